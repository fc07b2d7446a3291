"""Golden-section search of a knob, over few and noisy trials.

The range is divided on the knob's own scale, linear or logarithmic; whole numbers are rounded and never tried twice.
Kiefer 1953 (Proc. AMS 4): each trial after the second shrinks the range by 0.618, if the speed has one peak in it.
"""

import math
from collections.abc import Callable

from drivetrain.catalogue import Knob

__all__ = ["golden_section"]

_SHARE = (math.sqrt(5) - 1) / 2


def golden_section(
    knob: Knob, start: float, measure: Callable[[float], float | None], *, trials: int
) -> tuple[float, float]:
    """The best value that was measured, and what was measured of it.

    Args:
        start: the value now; what ``measure`` says is relative to it, and it is 0 there.
        measure: value → logarithm of the speed ratio against ``start``; None: it cannot be had, and is taken for worse
            than anything.
        trials: most calls of ``measure``.

    Returns:
        ``(start, 0.0)`` where nothing was better.
    """
    found: dict[float, float] = {start: 0.0}
    left = trials

    def at(place: float) -> float | None:
        nonlocal left
        value = _value(knob, place)
        if value not in found:
            if left == 0:
                return None
            left -= 1
            answer = measure(value)
            found[value] = -math.inf if answer is None else answer
        return found[value]

    low, high = _place(knob, knob.low), _place(knob, knob.high)
    inner = [high - _SHARE * (high - low), low + _SHARE * (high - low)]
    while left > 0:
        if _value(knob, inner[0]) == _value(knob, inner[1]):
            break
        first, second = at(inner[0]), at(inner[1])
        if first is None or second is None:
            break
        # A place that failed is on the far side of the peak whatever the other says: smaller asks for less.
        if first >= second:
            high, inner = inner[1], [inner[1] - _SHARE * (inner[1] - low), inner[0]]
        else:
            low, inner = inner[0], [inner[1], inner[0] + _SHARE * (high - inner[0])]
        if high - low < 1e-3 * abs(_place(knob, knob.high) - _place(knob, knob.low)):
            break
    best = max(found, key=lambda value: (found[value], value == start))
    return best, found[best]


def _place(knob: Knob, value: float) -> float:
    return math.log(value) if knob.scale == "log" else value


def _value(knob: Knob, place: float) -> float:
    value = math.exp(place) if knob.scale == "log" else place
    value = min(max(value, knob.low), knob.high)
    return round(value) if knob.whole else float(f"{value:.3g}")
