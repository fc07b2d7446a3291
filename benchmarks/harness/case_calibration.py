"""The free parameters of a case, found by measuring: profile, look at the account, correct, again."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

from cases.case import Case

__all__ = ["Calibration", "Round", "calibrate", "corrected"]

CLOSE = 0.015
"""Of 1: half of what is claimed, since the tuner's own profile is another one."""


@dataclass(frozen=True)
class Round:
    """One profile of the calibration.

    Attributes:
        parameters: that it was made with.
        shares: of its mean step, by the name of the share.
        classes: nanoseconds of its mean step.
    """

    parameters: Mapping[str, float]
    shares: Mapping[str, float]
    classes: Mapping[str, float]


@dataclass(frozen=True)
class Calibration:
    """All rounds, in order; ``best`` is the one whose largest deviation is the smallest."""

    rounds: tuple[Round, ...]
    best: Round


def corrected(case: Case, found: Round) -> dict[str, float]:
    """Parameters by which all shares would be as stated, if each moved its own time alone and in proportion.

    What no share is stated of takes as long as before, and is to be the rest of the step.
    """
    stated = {share.name: share.stated for share in case.shares}
    rest = 1 - sum(found.shares.values())
    scale = rest / (1 - sum(stated.values()))
    after = dict(found.parameters)
    for share in case.shares:
        parameter = case.parameters[share.parameter]
        factor = share.stated * scale / max(found.shares[share.name], 1e-3)
        factor = 1 / factor if parameter.falls else factor
        assert isfinite(factor)
        after[share.parameter] = parameter.legal(found.parameters[share.parameter] * factor)
    return after


def deviation(case: Case, found: Round) -> float:
    """The largest distance of a share from what is stated; 0 where none is."""
    return max((abs(found.shares[share.name] - share.stated) for share in case.shares), default=0.0)


def calibrate(
    case: Case, classes_of: Callable[[Mapping[str, float]], Mapping[str, float]], most: int
) -> Calibration:
    """Search for parameters with which the account shows what the source states.

    Args:
        classes_of: profiles the baseline with these parameters: nanoseconds by class.
        most: profiles at most; a case without shares has one.
    """
    parameters = {name: one.legal(one.start) for name, one in case.parameters.items()}
    rounds: list[Round] = []
    for _ in range(most if case.shares else 1):
        classes = classes_of(parameters)
        found = Round(
            dict(parameters), {share.name: share.of(classes) for share in case.shares}, dict(classes)
        )
        rounds.append(found)
        shown = (
            ", ".join(f"{name} {share:.1%}" for name, share in found.shares.items()) or "no share is stated"
        )
        told = ", ".join(f"{name} {value:g}" for name, value in parameters.items()) or "no parameters"
        print(f"calibration {len(rounds)}: {told}: {shown}", file=sys.stderr, flush=True)
        if deviation(case, found) <= CLOSE:
            break
        after = corrected(case, found)
        if after == parameters:
            # Nothing finer can be set.
            break
        parameters = after
    return Calibration(tuple(rounds), min(rounds, key=lambda one: deviation(case, one)))
