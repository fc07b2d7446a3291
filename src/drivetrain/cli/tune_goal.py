"""The options of ``drivetrain tune`` that say what counts."""

import math
from typing import TYPE_CHECKING

from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.tune.goals import Goal

__all__ = ["goal_of_options", "share_of"]


def goal_of_options(
    goal: str | None, slower_at_most: str | None, price_per_device_hour: float | None
) -> "Goal":
    """The goal that was asked for; None: the option was not given.

    Raises:
        DrivetrainError: there is no such goal, or an option belongs to another.
    """
    from drivetrain.tune.goals import Goal, goal_of_text

    name = "tokens_per_second" if goal is None else goal_of_text(goal)
    if slower_at_most is not None and name != "memory":
        raise DrivetrainError(
            f"--slower-at-most {slower_at_most} belongs to --goal memory, and the goal is {name}; drop one of them"
        )
    if price_per_device_hour is not None and name != "cost":
        raise DrivetrainError(
            f"--price-per-device-hour {price_per_device_hour:g} belongs to --goal cost, and the goal is {name}; drop "
            "one of them"
        )
    if price_per_device_hour is not None and not 0 < price_per_device_hour < math.inf:
        raise DrivetrainError(
            f"--price-per-device-hour {price_per_device_hour:g}: a price is a positive number; leave it out to get "
            "device-seconds"
        )
    share = Goal.slower_at_most if slower_at_most is None else share_of("--slower-at-most", slower_at_most)
    return Goal(name, share, price_per_device_hour)


def share_of(option: str, text: str) -> float:
    """``5%`` or ``0.05``.

    Raises:
        DrivetrainError: it is neither, or not between 0 and 1.
    """
    number = text.removesuffix("%")
    try:
        share = float(number) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise DrivetrainError(f"{option} {text}: expected a share, as in 5% or 0.05") from error
    if not 0 <= share <= 1:
        close = (
            f"{number}%" if not text.endswith("%") and 0 <= share <= 100 else "100%" if share > 1 else "0%"
        )
        raise DrivetrainError(f"{option} {text}: a share lies between 0% and 100%; nearest: {close}")
    return share
