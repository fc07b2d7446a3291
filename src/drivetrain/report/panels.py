"""Curves over the steps of a run: panels above each other on one step axis, and below them which steps stand apart."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drivetrain.report.axes import LARGEST, Scale, linear_ticks, scale_for, tick_words
from drivetrain.report.buckets import Curve, Gap, min_max_buckets
from drivetrain.report.svg import GRID, INK, MUTED, circle, document, line, path, polyline, rectangle, text

__all__ = ["BAD", "Panel", "Points", "Series", "panels_svg"]

BAD = "#d1242f"
"""Colour of what is not finite."""

_LEFT, _PLOT, _RIGHT, _TOP, _GAP, _STRIP = 96, 828, 36, 58, 36, 16
_WIDTH = _LEFT + _PLOT + _RIGHT

_TAG_COLOURS = {
    "warmup": "#b0b0b0",
    "compile": "#7f6a9c",
    "checkpoint": "#009e73",
    "evaluation": "#d55e00",
    "profile": "#e69f00",
    "gc": "#cc79a7",
}


@dataclass(frozen=True)
class Series:
    """A curve; ``values`` may hold None (not logged) and values that are not finite (marked)."""

    label: str
    steps: Sequence[float]
    values: Sequence[float | None]
    colour: str
    width: float = 1.5
    dash: str = ""
    marked: bool = True
    """Whether its values that are not finite are marked: off where another curve of the panel marks them."""


@dataclass(frozen=True)
class Points:
    """Single values, drawn as discs."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: str


@dataclass(frozen=True)
class Panel:
    """Curves that share a value axis."""

    title: str
    height: int
    series: tuple[Series, ...]
    points: tuple[Points, ...] = ()
    from_zero: bool = False
    limit: float | None = None
    """Upper end of the scale; what lies beyond is marked with its value. None: the greatest value."""


def panels_svg(
    panels: Sequence[Panel],
    *,
    tagged: Mapping[str, Sequence[int]],
    restarts: Sequence[int],
    words: str,
) -> str:
    """The whole figure.

    Args:
        tagged: tag → steps that carry it, ascending; a row of marks each below the panels.
        restarts: first steps of segments after the first: a dashed line through all panels.
        words: what the figure shows, for a screen reader.
    """
    places = [step for panel in panels for each in panel.series for step in each.steps]
    places += [step for panel in panels for each in panel.points for step in each.steps]
    first, last = (min(places), max(places)) if places else (0.0, 1.0)
    axis = _StepAxis(first, last)
    elements = list(_legend(panels, bool(restarts)))
    top = float(_TOP)
    for panel in panels:
        elements.extend(_panel(panel, axis, top))
        top += panel.height + _GAP
    bottom = top - _GAP
    top = bottom + 12
    for tag, steps in tagged.items():
        elements.extend(_strip(tag, steps, axis, top))
        top += _STRIP
    for step in restarts:
        x = axis.place(step)
        elements.append(line(x, _TOP, x, bottom, MUTED, dash="4 3"))
    elements.extend(_step_labels(axis, top + 8))
    return document(_WIDTH, top + 34, words, elements)


@dataclass(frozen=True)
class _StepAxis:
    first: float
    last: float

    def place(self, step: float) -> float:
        if self.last == self.first:
            return _LEFT + _PLOT / 2
        return _LEFT + _PLOT * (step - self.first) / (self.last - self.first)


def _legend(panels: Sequence[Panel], restarted: bool) -> Iterator[str]:
    x = float(_LEFT)
    entries: dict[str, tuple[str, float, str, bool]] = {}
    for panel in panels:
        for series in panel.series:
            entries.setdefault(series.label, (series.colour, series.width, series.dash, False))
        for points in panel.points:
            entries.setdefault(points.label, (points.colour, 0, "", True))
    if restarted:
        entries["restart"] = (MUTED, 1, "4 3", False)
    for label, (colour, width, dash, is_point) in entries.items():
        if is_point:
            yield circle(x + 10, 14, 4, colour)
        else:
            yield line(x, 14, x + 20, 14, colour, width=max(width, 1.5), dash=dash)
        yield text(x + 26, 18, label, size=12)
        x += 46 + 6.6 * len(label)


def _panel(panel: Panel, axis: _StepAxis, top: float) -> Iterator[str]:
    finite = [value for each in panel.series for value in each.values if value is not None]
    finite += [value for each in panel.points for value in each.values]
    shown = [min(max(value, -LARGEST), LARGEST) for value in finite if math.isfinite(value)]
    if panel.limit is not None:
        shown = [min(value, panel.limit) for value in shown]
    scale = scale_for(shown, from_zero=panel.from_zero)
    heading = panel.title + (", logarithmic" if scale.logarithmic else "")
    yield text(_LEFT, top - 6, heading, size=12, fill=MUTED)
    if not shown:
        nothing = "no finite value" if finite else "not logged"
        yield text(_LEFT + _PLOT / 2, top + panel.height / 2, nothing, anchor="middle", fill=MUTED)
    for tick in scale.ticks(max(2, panel.height // 36)) if shown else ():
        y = _height(scale, tick, panel, top)
        yield line(_LEFT, y, _LEFT + _PLOT, y, GRID, width=0.5)
        yield text(_LEFT - 8, y + 4, tick_words(tick), anchor="end", size=11, fill=MUTED)
    yield line(_LEFT, top + panel.height, _LEFT + _PLOT, top + panel.height, MUTED)
    gaps: list[Gap] = []
    for series in panel.series:
        curve = min_max_buckets(series.steps, series.values, _PLOT)
        yield from _curve(curve, series, axis, scale, panel, top)
        if panel.limit is not None:
            yield from _beyond(series, panel.limit, axis, top)
        gaps.extend(curve.gaps if series.marked else ())
    for points in panel.points:
        for step, value in zip(points.steps, points.values, strict=True):
            if math.isfinite(value):
                y = _height(scale, value, panel, top)
                yield circle(
                    axis.place(step), y, 4.5, points.colour, f"{points.label}, step {step:g}: {value:.6g}"
                )
            else:
                gaps.append(Gap(step, step, 1, "NaN" if math.isnan(value) else str(value)))
    for gap in gaps:
        yield _mark(gap, axis, panel, top)


def _height(scale: Scale, value: float, panel: Panel, top: float) -> float:
    return top + panel.height * (1 - scale.share(value))


def _curve(
    curve: Curve, series: Series, axis: _StepAxis, scale: Scale, panel: Panel, top: float
) -> Iterator[str]:
    for piece in curve.pieces:
        places = [(axis.place(step), _height(scale, value, panel, top)) for step, value in piece]
        if len(places) == 1:
            # A line of one point is invisible; a lone finite value between two NaN must not be.
            (x, y), (step, value) = places[0], piece[0]
            yield circle(x, y, 2.5, series.colour, f"{series.label}, step {step:g}: {value:.6g}")
        else:
            yield polyline(places, series.colour, width=series.width, dash=series.dash)


def _beyond(series: Series, limit: float, axis: _StepAxis, top: float) -> Iterator[str]:
    """A triangle for each step beyond the scale, however many share a column of pixels."""
    for step, value in zip(series.steps, series.values, strict=True):
        if value is not None and math.isfinite(value) and value > limit:
            x = axis.place(step)
            outline = f"M{x - 5:.2f} {top + 10:.2f}L{x:.2f} {top:.2f}L{x + 5:.2f} {top + 10:.2f}Z"
            yield path(outline, MUTED, f"{series.label}, step {step:g}: {value:.6g}, beyond the scale")


def _mark(gap: Gap, axis: _StepAxis, panel: Panel, top: float) -> str:
    """A triangle at the edge that the value went beyond, over all the steps it stands for."""
    left, right = axis.place(gap.first) - 5, axis.place(gap.last) + 5
    middle = (left + right) / 2
    edge, tip = (top + panel.height - 10, top + panel.height) if gap.below else (top + 10, top)
    steps = f"step {gap.first:g}" if gap.first == gap.last else f"steps {gap.first:g}-{gap.last:g}"
    outline = f"M{left:.2f} {edge:.2f}L{middle:.2f} {tip:.2f}L{right:.2f} {edge:.2f}Z"
    return path(outline, BAD, f"{steps}: {gap.words}")


def _strip(tag: str, steps: Sequence[int], axis: _StepAxis, top: float) -> Iterator[str]:
    """A row of marks. Neighbours that would touch are one mark."""
    yield text(_LEFT - 8, top + 10, tag, anchor="end", size=11, fill=MUTED)
    yield line(_LEFT, top + 6, _LEFT + _PLOT, top + 6, GRID, width=0.5)
    colour = _TAG_COLOURS.get(tag, "#999999")
    start = end = None
    for step in steps:
        if start is None or end is None:
            start = end = step
        elif axis.place(step) - axis.place(end) <= 3 or step == end + 1:
            end = step
        else:
            yield _range(tag, start, end, axis, top, colour)
            start = end = step
    if start is not None and end is not None:
        yield _range(tag, start, end, axis, top, colour)


def _range(tag: str, start: int, end: int, axis: _StepAxis, top: float, colour: str) -> str:
    left, right = axis.place(start) - 1.5, axis.place(end) + 1.5
    words = f"{tag}: step {start}" if start == end else f"{tag}: steps {start}-{end}"
    return rectangle(left, top + 1, right - left, 10, colour, words)


def _step_labels(axis: _StepAxis, y: float) -> Iterator[str]:
    for tick in linear_ticks(axis.first, axis.last, 8):
        if tick == int(tick):
            yield text(axis.place(tick), y + 8, f"{int(tick):,}", anchor="middle", size=11, fill=MUTED)
    yield text(_LEFT - 8, y + 8, "step", anchor="end", size=11, fill=INK)
