"""Sweeps of a knob as a picture: time of a step over the value, a line for each side."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.report.axes import scale_for, tick_words
from drivetrain.report.svg import GRID, MUTED, circle, document, line, polyline, rectangle, text

__all__ = ["Sweep", "draw", "least_effect", "sweep_svg", "sweep_text"]

ROOT = Path(__file__).resolve().parents[2]

_LEFT, _PLOT, _HEIGHT, _TOP, _RIGHT = 90, 620, 300, 74, 40
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


@dataclass(frozen=True)
class Sweep:
    """What was measured of a knob.

    Attributes:
        title, knob: what the figure says above itself and below its axis.
        sides: by name: value of the knob and seconds, ascending.
        levels: by name: seconds that do not depend on the knob, drawn as dashed lines.
    """

    title: str
    knob: str
    sides: Mapping[str, Sequence[tuple[float, float]]]
    levels: Mapping[str, float]

    def best(self, side: str) -> tuple[float, float]:
        """The value that took the least time, and that time."""
        return min(self.sides[side], key=lambda point: point[1])

    def interior(self, side: str) -> float:
        """Least time at the two ends over the least time: above 1 where the best value lies between them."""
        points = self.sides[side]
        return min(points[0][1], points[-1][1]) / self.best(side)[1]


def sweep_svg(sweep: Sweep) -> str:
    """The figure: the knob on a logarithmic axis, milliseconds from zero."""
    values = sorted({value for points in sweep.sides.values() for value, _ in points})
    times = [seconds * 1e3 for points in sweep.sides.values() for _, seconds in points]
    scale = scale_for([*times, *(seconds * 1e3 for seconds in sweep.levels.values())], from_zero=True)
    low, high = math.log(values[0]), math.log(values[-1])
    bottom = _TOP + _HEIGHT

    def x(value: float) -> float:
        return _LEFT + _PLOT * ((math.log(value) - low) / (high - low) if high > low else 0.5)

    def y(milliseconds: float) -> float:
        return bottom - _HEIGHT * scale.share(milliseconds)

    elements = [text(16, 24, sweep.title, size=16)]
    for tick in scale.ticks():
        elements.append(line(_LEFT, y(tick), _LEFT + _PLOT, y(tick), GRID, width=0.5))
        elements.append(text(_LEFT - 8, y(tick) + 4, tick_words(tick), anchor="end", fill=MUTED))
    for value in values:
        elements.append(line(x(value), bottom, x(value), bottom + 4, GRID))
        elements.append(text(x(value), bottom + 18, f"{value:g}", anchor="middle", fill=MUTED))
    elements.append(text(_LEFT + _PLOT / 2, bottom + 38, sweep.knob, anchor="middle"))
    elements.append(text(16, _TOP - 10, "ms", fill=MUTED))
    place = float(_LEFT)
    for number, (name, points) in enumerate(sweep.sides.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        elements.append(rectangle(place, 40, 12, 12, colour))
        elements.append(text(place + 17, 51, name, fill=MUTED))
        place += 40 + 7 * len(name)
        elements.append(
            polyline([(x(value), y(seconds * 1e3)) for value, seconds in points], colour, width=2)
        )
        for value, seconds in points:
            tip = f"{name}, {sweep.knob} {value:g}: {seconds * 1e3:.1f} ms"
            elements.append(circle(x(value), y(seconds * 1e3), 4, colour, tip))
    for name, seconds in sweep.levels.items():
        elements.append(line(_LEFT, y(seconds * 1e3), _LEFT + _PLOT, y(seconds * 1e3), MUTED, dash="5 4"))
        elements.append(text(_LEFT + _PLOT, y(seconds * 1e3) - 5, name, anchor="end", fill=MUTED))
    words = f"{sweep.title}: " + "; ".join(
        f"{name} least {sweep.best(name)[1] * 1e3:.1f} ms at {sweep.best(name)[0]:g}" for name in sweep.sides
    )
    return document(_LEFT + _PLOT + _RIGHT, bottom + 56, words, elements)


def sweep_text(sweep: Sweep) -> str:
    """The same in words, for a note: milliseconds by value."""
    return "; ".join(
        f"{name}: " + ", ".join(f"{value:g} {seconds * 1e3:.0f} ms" for value, seconds in points)
        for name, points in sweep.sides.items()
    )


def draw(name: str, sweep: Sweep, size: str) -> str:
    """Where the figure is; a smaller size leaves that of the full one as it is."""
    folder = ROOT / "benchmarks" / "results" if size == "full" else ROOT / "runs" / f"overlap-{size}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    path.write_text(sweep_svg(sweep), encoding="utf-8")
    return f"drawn in {path.relative_to(ROOT)}"


def least_effect(noise: float) -> float:
    """What counts as a difference. Bounded: on a machine that is too noisy a claim is lost, not won."""
    return min(0.05, max(0.01, 2 * noise))
