"""Golden-section search of a knob, over few and noisy trials.

The range is divided on the knob's own scale, linear or logarithmic, or by the places of its legal values; whole numbers
are rounded and nothing is tried twice. Kiefer 1953 (Proc. AMS 4): each trial after the second shrinks the range by
0.618, if the speed has one peak in it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drivetrain.catalogue import Knob
from drivetrain.measure.statistics import least_effect

__all__ = ["Axis", "axis_of", "golden_section"]

_SHARE = (math.sqrt(5) - 1) / 2
_NARROWEST = 1e-3
"""Of the whole range: what is left then is one place."""


@dataclass(frozen=True)
class Axis:
    """Numbers of a knob as places on a line, on which a search divides ranges.

    Attributes:
        low, high: first and last place.
        place: number → place, increasing.
        number: place → the legal number nearest to it; any place between ``low`` and ``high``.
        beside: legal number → the legal numbers next to it; none where numbers lie close.
    """

    low: float
    high: float
    place: Callable[[float], float]
    number: Callable[[float], float]
    beside: Callable[[float], Sequence[float]]


def axis_of(knob: Knob, values: Sequence[float] | None = None) -> Axis:
    """The line of ``knob``.

    Args:
        values: its legal numbers, ascending, two or more; None: every number of its range is legal.
    """
    if values is not None:
        assert len(values) >= 2, (
            f"{knob.field} has {len(values)} legal values, between which nothing can be searched"
        )

        def place_of(value: float) -> float:
            return float(min(range(len(values)), key=lambda place: abs(values[place] - value)))

        def next_to(value: float) -> Sequence[float]:
            here = round(place_of(value))
            return [values[place] for place in (here - 1, here + 1) if 0 <= place < len(values)]

        return Axis(0.0, len(values) - 1.0, place_of, lambda place: values[round(place)], next_to)
    logarithmic = knob.scale == "log"

    def place(value: float) -> float:
        return math.log(value) if logarithmic else value

    def number(place: float) -> float:
        value = math.exp(place) if logarithmic else place
        value = min(max(value, knob.low), knob.high)
        return round(value) if knob.whole else float(f"{value:.3g}")

    def beside(value: float) -> Sequence[float]:
        return [other for other in (value - 1, value + 1) if knob.whole and knob.low <= other <= knob.high]

    return Axis(place(knob.low), place(knob.high), place, number, beside)


def golden_section(
    knob: Knob,
    start: float,
    measure: Callable[[float], float | None],
    *,
    trials: int,
    values: Sequence[float] | None = None,
    error: Callable[[float], float] | None = None,
) -> tuple[float, float]:
    """The best value that was measured, and what was measured of it.

    Args:
        start: the value now; what ``measure`` says is relative to it, and it is 0 there.
        measure: value → logarithm of the speed ratio against ``start``; None: it cannot be had. That is no trial, and
            the search goes on where ``start`` lies.
        trials: most values that are measured.
        values: the legal ones, where not every number of the range is.
        error: value that was measured → standard error of what was measured. With it the search ends where the best
            value and the measured ones next to it differ by less than their errors, or by less than an effect that
            ever counts: what lies between them is then no better that anybody could tell. None: it does not end so.

    Returns:
        ``(start, 0.0)`` where nothing was better.
    """
    axis = axis_of(knob, values)
    found: dict[float, float | None] = {start: 0.0}
    left = trials

    def known(value: float) -> bool:
        """Whether it is, now or from before."""
        nonlocal left
        if value not in found:
            if left == 0:
                return False
            found[value] = measure(value)
            left -= found[value] is not None
        return True

    low, high = axis.low, axis.high
    inner = [high - _SHARE * (high - low), low + _SHARE * (high - low)]
    while left > 0 and high - low >= _NARROWEST * (axis.high - axis.low):
        first, second = (axis.number(place) for place in inner)
        if first == second or not (known(first) and known(second)):
            break
        if _goes_down(found[first], found[second], below=axis.place(start) <= inner[0]):
            high, inner = inner[1], [inner[1] - _SHARE * (inner[1] - low), inner[0]]
        else:
            low, inner = inner[0], [inner[1], inner[0] + _SHARE * (high - inner[0])]
        if error is not None and _is_flat(found, start, error):
            return _best(found, start)
    # Of a set of numbers, rounding may have left out what lies beside the best.
    while left > 0 and not (error is not None and _is_flat(found, start, error)):
        beside = [value for value in axis.beside(_best(found, start)[0]) if value not in found]
        if not beside:
            break
        known(beside[0])
    return _best(found, start)


def _best(found: dict[float, float | None], start: float) -> tuple[float, float]:
    had = {value: gain for value, gain in found.items() if gain is not None}
    best = max(had, key=lambda value: (had[value], value == start))
    return best, had[best]


def _goes_down(first: float | None, second: float | None, *, below: bool) -> bool:
    """Whether the peak is sought below the second of two inner places, rather than above the first.

    Args:
        first, second: what was measured there; None: it cannot be had.
        below: whether the value that the search began with, which can be had, lies below both.
    """
    if first is None and second is None:
        return below
    if first is None or second is None:
        return second is None
    return first >= second


def _is_flat(found: dict[float, float | None], start: float, error: Callable[[float], float]) -> bool:
    """Whether the best value and the ones next to it, on either side, cannot be told apart."""
    had = sorted((value, gain) for value, gain in found.items() if gain is not None)
    inside = range(1, len(had) - 1)
    top = max(range(len(had)), key=lambda place: (had[place][1], place in inside))
    if top not in inside:
        return False

    def of(value: float) -> float:
        return 0.0 if value == start else error(value)

    value, gain = had[top]
    return all(
        gain - beside <= max(math.hypot(of(value), of(other)), math.log1p(least_effect(0)))
        for other, beside in (had[top - 1], had[top + 1])
    )
