"""What the kept changes save: measured in the final trial, and by the accounts of the windows of the same processes.

Why the two are not one figure twice: ``docs/tune.md``, "What it saved".
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drivetrain.archive.account_file import UNEXPLAINED
from drivetrain.measure.statistics import student_t_quantile
from drivetrain.tune.block_window import BlockWindow

__all__ = ["AGREES_WITHIN", "CONFIDENCE", "Difference", "difference_of", "saved", "why_withheld"]

AGREES_WITHIN = 0.10
"""Relative deviation of the account's seconds from the measured ones up to which they agree."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """Mean of one side less that of the other, with the ends of its interval."""

    value: float
    low: float
    high: float


def difference_of(a: Sequence[float], b: Sequence[float], share: float = 1.0) -> Difference:
    """``mean(a) - share · mean(b)`` of at least two blocks a side, each side with a variance of its own.

    Welch's interval: the degrees of freedom are Satterthwaite's (Welch 1947).
    """
    assert min(len(a), len(b)) >= 2, "one block has no spread"
    value = math.fsum(a) / len(a) - share * math.fsum(b) / len(b)
    of_a = statistics.variance(a) / len(a)
    of_b = share**2 * statistics.variance(b) / len(b)
    whole = of_a + of_b
    if whole == 0:
        return Difference(value, value, value)
    # Of the shares, not of the variances, whose squares may be too small for a float.
    freedom = 1 / ((of_a / whole) ** 2 / (len(a) - 1) + (of_b / whole) ** 2 / (len(b) - 1))
    half = student_t_quantile((1 + CONFIDENCE) / 2, freedom) * math.sqrt(whole)
    return Difference(value, value - half, value + half)


def why_withheld(trial: Mapping[str, Any]) -> str | None:
    """Why the accounts say nothing of what a trial measured, in one sentence; None where they do."""
    without = [
        (number, block)
        for number, block in enumerate(trial["blocks"], start=1)
        if block.get("window") is None
    ]
    if not without:
        return None
    if len(without) == len(trial["blocks"]) and not any(block.get("no_window") for _, block in without):
        return "no block of the trial carried a profiled window"
    number, block = without[0]
    who = "baseline" if block["side"] == "A" else "final configuration"
    more = f", and {len(without) - 1} more" if len(without) > 1 else ""
    why = block.get("no_window") or "it carried none"
    return f"block {number} of the final trial, of the {who}, has no account{more}: {why}"


def saved(
    trial: Mapping[str, Any],
    *,
    steps: int,
    world_size: int,
    final_world_size: int | None = None,
    final_share: float = 1.0,
    treated: Sequence[str] = (),
    withheld: str | None = None,
) -> dict[str, Any]:
    """What a step of the final configuration saves, measured and by the account of the same processes.

    Args:
        trial: its document; every block has finished, and the final configuration is faster by the mean of its steps.
        steps: of the whole run.
        world_size: devices.
        final_world_size: of the final configuration, where those are others.
        final_share: tokens of a step of the baseline over those of a step of the final configuration, whose seconds
            count by that share: a step of a larger batch does the work of several.
        treated: classes that the kept changes treat.
        withheld: why the account says nothing, where that is known already.
    """
    blocks = {side: [block for block in trial["blocks"] if block["side"] == side] for side in ("A", "B")}
    plain = {side: [float(block["mean_step_s"]) for block in of_side] for side, of_side in blocks.items()}
    measured = difference_of(plain["A"], plain["B"], final_share).value
    withheld = withheld if withheld is not None else why_withheld(trial)
    by_account: dict[str, Any] = dict.fromkeys(_BY_ACCOUNT)
    if withheld is None:
        windows = {
            side: [BlockWindow.from_document(block["window"]) for block in of_side]
            for side, of_side in blocks.items()
        }
        by_account = _by_account(windows, plain, measured, final_share, treated)
    means = {side: statistics.fmean(of_side) for side, of_side in plain.items()}
    final_devices = world_size if final_world_size is None else final_world_size
    device_s = means["A"] * world_size - means["B"] * final_share * final_devices
    return {
        "seconds_per_step": measured,
        **by_account,
        "device_hours_per_run": device_s * steps / 3600,
        "device_hours_per_million_steps": device_s * 1e6 / 3600,
        "rule": _RULE if final_share == 1.0 else f"{_RULE}; {_as_many_tokens(final_share)}",
        "withheld": withheld,
    }


_BY_ACCOUNT = (
    "account_seconds_per_step",
    "deviation",
    "deviation_low",
    "deviation_high",
    "agreement",
    "blocks",
    "classes",
    "class_intervals",
    "treated",
    "profiled_seconds_per_step",
    "overhead_seconds_per_step",
    "unexplained_seconds_per_step",
)


def _by_account(
    windows: Mapping[str, Sequence[BlockWindow]],
    plain: Mapping[str, Sequence[float]],
    measured: float,
    share: float,
    treated: Sequence[str],
) -> dict[str, Any]:
    assert measured > 0, "the final trial found it faster by the mean of all its steps"
    told = {side: [math.fsum(one.plain_s.values()) for one in windows[side]] for side in windows}
    # Of each process what the account says of a step, less what its measured steps took: how fast the machine was
    # while that process ran is in both.
    apart = {
        side: [by_account - step_s for by_account, step_s in zip(told[side], plain[side], strict=True)]
        for side in windows
    }
    deviation = difference_of(apart["A"], apart["B"], share)
    classes = _classes(windows, share)
    treats = [name for name in treated if name in classes]
    low, high = deviation.low / measured, deviation.high / measured
    return {
        "account_seconds_per_step": math.fsum(one.value for one in classes.values()),
        "deviation": deviation.value / measured,
        "deviation_low": low,
        "deviation_high": high,
        "agreement": _agreement(low, high),
        "blocks": sum(map(len, windows.values())),
        "classes": {name: one.value for name, one in classes.items() if one.value},
        "class_intervals": {name: [one.low, one.high] for name, one in classes.items() if one.value},
        "treated": {
            "classes": treats,
            "seconds_per_step": math.fsum(classes[name].value for name in treats),
        },
        "profiled_seconds_per_step": _difference(
            windows, share, lambda one: math.fsum(one.explained_s.values())
        ),
        "overhead_seconds_per_step": _difference(
            windows, share, lambda one: one.profiled_step_s - one.plain_step_s
        ),
        "unexplained_seconds_per_step": _difference(
            windows, share, lambda one: one.classes.get(UNEXPLAINED, 0.0) / 1e9
        ),
    }


def _classes(windows: Mapping[str, Sequence[BlockWindow]], share: float) -> dict[str, Difference]:
    """Of each class the seconds of a step of the baseline less those of the final configuration."""
    seconds = {side: [one.plain_s for one in of_side] for side, of_side in windows.items()}
    names = dict.fromkeys(name for side in ("A", "B") for one in seconds[side] for name in one)
    return {
        name: difference_of(
            [one.get(name, 0.0) for one in seconds["A"]], [one.get(name, 0.0) for one in seconds["B"]], share
        )
        for name in names
    }


def _difference(
    windows: Mapping[str, Sequence[BlockWindow]], share: float, figure: Callable[[BlockWindow], float]
) -> float:
    return difference_of(list(map(figure, windows["A"])), list(map(figure, windows["B"])), share).value


def _agreement(low: float, high: float) -> Literal["agree", "differ", "undecided"]:
    """What the interval of the relative deviation says of :data:`AGREES_WITHIN`."""
    if low >= -AGREES_WITHIN and high <= AGREES_WITHIN:
        return "agree"
    return "differ" if low > AGREES_WITHIN or high < -AGREES_WITHIN else "undecided"


_RULE = (
    "seconds_per_step: baseline less final, means over blocks of the mean of their measured steps; account: every "
    "class but the unexplained in the profiled window of the same blocks, over the mean recorded step by the run's own "
    "clock, times the mean of the steps beside the window, of which none is measured; interval: Welch's, of what each "
    "block's account says of a step less what its measured steps took"
)


def _as_many_tokens(final_share: float) -> str:
    return f"of a final step {final_share:.4g}, which is as many tokens as a step of the baseline"
