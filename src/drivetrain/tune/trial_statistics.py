"""What the blocks of a trial say: a ratio of speeds with its interval, and a decision.

The unit of replication is the block, one process: processes of the same configuration differ by more than their steps
do (memory layout, thread placement), so that steps of one process are no independent observations. Formulas:
``docs/tune.md``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from drivetrain.measure.statistics import least_effect, student_t_quantile

__all__ = [
    "BLOCKS_OF_UNIT",
    "Judgement",
    "Noise",
    "Side",
    "SpeedRatio",
    "judge",
    "noise_of",
    "order_of",
    "speed_ratio",
    "units_needed",
]

Side = Literal["A", "B"]
State = Literal["faster", "slower", "no gain", "undecided"]
BLOCKS_OF_UNIT = 4
_UNITS: tuple[tuple[Side, ...], ...] = (("A", "B", "B", "A"), ("B", "A", "A", "B"))
_MOST_UNITS = 1000


@dataclass(frozen=True)
class SpeedRatio:
    """Speed of the candidate over that of its parent, above 1 is faster.

    Attributes:
        ratio: of the geometric means of the blocks' tokens per second.
        low, high: ends of its interval.
        deviation: standard deviation of one block, on the log scale.
        confidence: coverage of the interval.
    """

    ratio: float
    low: float
    high: float
    deviation: float
    confidence: float

    def to_document(self) -> dict[str, Any]:
        """``{"ratio", "low", "high", "deviation", "confidence"}``."""
        return {
            "ratio": self.ratio,
            "low": self.low,
            "high": self.high,
            "deviation": self.deviation,
            "confidence": self.confidence,
        }


@dataclass(frozen=True)
class Noise:
    """How blocks of one and the same configuration differ, on the log scale: a sum of squares and its freedom."""

    squares: float = 0.0
    freedom: int = 0

    @property
    def deviation(self) -> float | None:
        """Standard deviation of a block; None where nothing was repeated."""
        return math.sqrt(self.squares / self.freedom) if self.freedom else None

    def __add__(self, other: "Noise") -> "Noise":
        return Noise(self.squares + other.squares, self.freedom + other.freedom)


@dataclass(frozen=True)
class Judgement:
    """What is decided of a trial after one look.

    Attributes:
        state: ``faster``: the interval lies above 1 and the ratio reaches the least effect. ``slower``: it lies below
            1. ``no gain``: it ends below 1%, which no noise explains away. Else ``undecided``.
        measured: the ratio.
        least_effect: relative effect from which on one counts.
        why: in words.
    """

    state: State
    measured: SpeedRatio
    least_effect: float
    why: str


def noise_of(blocks: Sequence[float], places: Sequence[int] | None = None) -> Noise:
    """Of blocks (tokens per second) of one configuration in one trial.

    Args:
        places: of the blocks in time; from four blocks on, a linear drift over them is no noise.
    """
    if len(blocks) < 2:
        return Noise()
    logs = np.log(np.asarray(blocks, dtype=np.float64))
    columns = [np.ones_like(logs)]
    if places is not None and len(blocks) >= 4:
        columns.append(np.asarray(places, dtype=np.float64))
    design = np.stack(columns, axis=1)
    residual = logs - design @ np.linalg.lstsq(design, logs, rcond=None)[0]
    return Noise(float(residual @ residual), len(blocks) - len(columns))


def order_of(units: int) -> list[Side]:
    """Sides of the blocks of a trial: A B B A, then B A A B, and so on.

    In either the mean place of both sides is the same, so that a linear drift of the machine cancels in the ratio. What
    repeats with the length of a unit (a neighbour that wakes up every quarter of a minute) does so over two of them.
    """
    return [side for number in range(units) for side in _UNITS[number % 2]]


def speed_ratio(order: Sequence[Side], speeds: Sequence[float], *, confidence: float) -> SpeedRatio:
    """The ratio B / A of blocks run in ``order``, see :func:`order_of`; units of one kind alone are taken as well.

    A linear drift cancels in the ratio. From
    two units on the drift is also fitted and taken out of the deviation; with a single unit that would leave one
    degree of freedom, and the drift widens the interval instead. Student's t on the logarithms, one variance of both
    sides.

    Args:
        order: side of each block, in time.
        speeds: tokens per second of each block, positive.
        confidence: of the two-sided interval.
    """
    assert len(order) == len(speeds) >= BLOCKS_OF_UNIT
    units = [tuple(order[first : first + BLOCKS_OF_UNIT]) for first in range(0, len(order), BLOCKS_OF_UNIT)]
    assert set(units) <= set(_UNITS), order
    logs = np.log(np.asarray(speeds, dtype=np.float64))
    places = np.arange(len(order), dtype=np.float64)
    is_b = np.asarray([side == "B" for side in order], dtype=np.float64)
    columns = [np.ones_like(places), is_b]
    if len(order) >= 8:
        columns.append(places - places.mean())
    design = np.stack(columns, axis=1)
    solution = np.linalg.lstsq(design, logs, rcond=None)[0]
    residual = logs - design @ solution
    freedom = len(order) - len(columns)
    deviation = math.sqrt(float(residual @ residual) / freedom)
    half = student_t_quantile((1 + confidence) / 2, freedom) * deviation * math.sqrt(4 / len(order))
    log_ratio = float(solution[1])
    return SpeedRatio(
        math.exp(log_ratio), _exp(log_ratio - half), _exp(log_ratio + half), deviation, confidence
    )


def judge(
    order: Sequence[Side],
    speeds: Sequence[float],
    *,
    looks: int,
    confidence: float,
    noise: Noise,
    words: tuple[str, str] = ("faster", "slower"),
) -> Judgement:
    """Decide of the blocks so far.

    Args:
        order, speeds: see :func:`speed_ratio`.
        looks: how many looks were declared: each has an interval at ``1 - (1 - confidence) / looks`` (Bonferroni), so
            that looking again does not make errors more frequent.
        confidence: over all looks together.
        noise: of blocks of the parent, this trial's included.
        words: what more of ``speeds`` is called, and less of it, where it is another score than speed.
    """
    more, less = words
    measured = speed_ratio(order, speeds, confidence=1 - (1 - confidence) / looks)
    deviation = noise.deviation
    least = least_effect(deviation if deviation is not None else measured.deviation)
    interval = f"{measured.ratio:.3f}x, {confidence:.0%} interval {measured.low:.3f} to {measured.high:.3f}"
    if measured.low > 1 and measured.ratio >= 1 + least:
        return Judgement("faster", measured, least, f"{more}: {interval}")
    if measured.high < 1:
        return Judgement("slower", measured, least, f"{less}: {interval}")
    if measured.high < 1 + least_effect(0):
        return Judgement("no gain", measured, least, f"no gain of {least_effect(0):.0%} or more: {interval}")
    effect = max(abs(math.log(measured.ratio)), math.log1p(least_effect(0)))
    units = units_needed(effect, measured.deviation, looks=looks, confidence=confidence)
    blocks = (
        f"about {BLOCKS_OF_UNIT * units} blocks"
        if units is not None
        else f"more than {BLOCKS_OF_UNIT * _MOST_UNITS} blocks"
    )
    if measured.low > 1:
        why = f"{more}, but by less than the least effect that counts here, {least:.1%}: {interval}"
    else:
        why = (
            f"this machine is noisier than the effect: {interval}; blocks of the same configuration deviate by "
            f"{measured.deviation:.1%}, and to tell {math.expm1(effect):.1%} {blocks} would be needed"
        )
    return Judgement("undecided", measured, least, why)


def units_needed(effect: float, deviation: float, *, looks: int, confidence: float) -> int | None:
    """Units whose interval is no wider than ``effect`` (log) to each side; None: more than can be counted."""
    for units in range(1, _MOST_UNITS + 1):
        freedom = 2 if units == 1 else 4 * units - 3
        quantile = student_t_quantile(1 - (1 - confidence) / looks / 2, freedom)
        if quantile * deviation * math.sqrt(1 / units) <= effect:
            return units
    return None


def _exp(value: float) -> float:
    """``exp`` that ends at the largest float: an interval may be as wide as that."""
    return math.exp(min(value, 700.0))
