"""What all models of time have in common: the mean step, the bound, and how a saving becomes a ratio."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from drivetrain.catalogue.time_models.facts import TimeFacts
from drivetrain.config import RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import NoPrediction, Prediction

__all__ = ["MeanStep", "TimeModel", "mean_step", "pipelined_ns", "predicted"]


@dataclass(frozen=True)
class TimeModel:
    """A model of one optimisation.

    Attributes:
        rule: how it computes, with what it assumes, in words for the documentation.
        predict: (facts of the configuration that was profiled, configuration after the change) → what it expects.
    """

    rule: str
    predict: Callable[[TimeFacts, RunConfig], Prediction | NoPrediction]


@dataclass(frozen=True)
class MeanStep:
    """The mean over ranks of their mean steady step, in ns."""

    window_ns: float
    classes: Mapping[str, float]

    def ns_of(self, treats: Iterable[str]) -> float:
        """Time of classes, or of all classes of groups; what two of them name counts once."""
        wanted = tuple(treats)
        return sum(
            ns
            for name, ns in self.classes.items()
            if any(name == one or name.startswith(f"{one}.") for one in wanted)
        )


def mean_step(account: Account) -> MeanStep | None:
    """The mean step of an account; None where it has no steps, or they take no time."""
    times: list[float] = []
    sums: list[dict[str, float]] = []
    for rank in account.ranks:
        windows = [step.window for step in rank.steady_steps]
        if not windows:
            return None
        times.append(statistics.fmean(window.window_ns for window in windows))
        names = dict.fromkeys(name for window in windows for name in window.classes)
        sums.append(
            {name: statistics.fmean(window.classes.get(name, 0) for window in windows) for name in names}
        )
    if not times or not statistics.fmean(times):
        return None
    names = dict.fromkeys(name for column in sums for name in column)
    classes = {name: statistics.fmean(column.get(name, 0.0) for column in sums) for name in names}
    return MeanStep(statistics.fmean(times), classes)


def predicted(
    step: MeanStep,
    treats: Sequence[str],
    saved_ns: float,
    rule: str,
    *,
    low_ns: float | None = None,
    high_ns: float | None = None,
    memory_bytes: int | None = None,
) -> Prediction | NoPrediction:
    """A saving as a ratio of step times: window / (window - saved).

    No saving is larger than the time of what is treated: a model that says more is cut off there. A negative saving is
    a cost.

    Args:
        treats: classes, or groups of them, from which it is saved.
        saved_ns: of the mean step.
        low_ns, high_ns: what the model leaves open, both or neither; they may come in either order.
    """
    bound_ns = step.ns_of(treats)
    if bound_ns >= step.window_ns:
        return NoPrediction("what it treats is the whole step, so that nothing bounds its gain")

    def ratio(ns: float) -> float:
        return step.window_ns / (step.window_ns - min(ns, bound_ns))

    if low_ns is None or high_ns is None:
        assert low_ns is None
        assert high_ns is None
        return Prediction(ratio(saved_ns), rule, memory_bytes)
    ends = sorted((low_ns, saved_ns, high_ns))
    return Prediction(ratio(saved_ns), rule, memory_bytes, ratio(ends[0]), ratio(ends[2]))


def pipelined_ns(transfer_ns: float, compute_ns: float, pieces: float) -> float:
    """Time of a transfer and a computation that go on at once in equal pieces, each waiting for one of the other:
    max(a, b) + min(a, b) / pieces. One piece: one after the other. (Wang et al. 2023, ASPLOS, section 5.)"""
    assert pieces >= 1
    return max(transfer_ns, compute_ns) + min(transfer_ns, compute_ns) / pieces
