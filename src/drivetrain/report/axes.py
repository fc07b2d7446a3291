"""Scales and ticks: from a value to a place on a figure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LARGEST", "Scale", "linear_ticks", "scale_for", "tick_words"]

LARGEST = 1e200
"""Beyond this the arithmetic of a scale would leave the floats; a curve's values are held inside first."""

_LOG_FROM = math.log10(30.0)
"""A positive curve whose greatest value is 30 times its least is drawn on a logarithmic scale."""


@dataclass(frozen=True)
class Scale:
    """Maps ``low``..``high`` to 0..1."""

    low: float
    high: float
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Place of ``value``, held inside 0..1."""
        if self.logarithmic:
            low, high = math.log10(self.low), math.log10(self.high)
            share = (math.log10(max(value, self.low)) - low) / (high - low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside, about ``count`` of them."""
        if not self.logarithmic:
            return linear_ticks(self.low, self.high, count)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        powers = [10.0**power for power in range(first, last + 1) if self.low <= 10.0**power <= self.high]
        if len(powers) >= 3:
            stride = math.ceil(len(powers) / (count + 1))
            return powers[::stride]
        steps = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
        return [value for value in steps if self.low <= value <= self.high]


def scale_for(values: Sequence[float], *, from_zero: bool = False) -> Scale:
    """A scale that holds all of ``values`` (within :data:`LARGEST`), with a little room.

    Logarithmic where positive values span a wide range.
    ``from_zero``: the scale begins at zero, so that lengths can be compared.
    """
    if not values:
        return Scale(0.0, 1.0)
    low, high = min(values), max(values)
    if not from_zero and low > 1 / LARGEST:
        # In logarithms: the ratio itself may be no float.
        decades = math.log10(high) - math.log10(low)
        if decades >= _LOG_FROM:
            room = 10 ** (0.04 * decades)
            return Scale(low / room, high * room, True)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
        return Scale(low, high + 0.06 * (high - low) if high > low else 1.0)
    # A constant needs some height too; so does one so large that a fraction of it is lost to rounding.
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(low - room, high + room)


_SMALLEST = 1e-300


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten inside ``low``..``high``."""
    raw = (high - low) / max(count, 1)
    # A range so small that powers of ten below it are no normal numbers has no multiples to show.
    if not raw > _SMALLEST:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_words(value: float) -> str:
    """A tick's label: ``1,500``, ``0.25``, ``2e-05``."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e7:
        return f"{value:,.6f}".rstrip("0").rstrip(".")
    return f"{value:.3g}"
