"""Live bytes over one step, categories stacked: what was predicted above what was measured, on one scale."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from drivetrain.measure.memory import CATEGORIES, MemoryByCategory, Timeline
from drivetrain.report.axes import Scale, tick_words
from drivetrain.report.memory_text import bytes_words
from drivetrain.report.svg import GRID, INK, MUTED, document, line, path, rectangle, text

__all__ = ["memory_svg"]

_LEFT, _PLOT, _RIGHT, _TOP, _HEIGHT, _STRIP, _GAP = 84, 828, 24, 74, 210, 14, 58
_COLOURS = {
    "parameters": "#0072b2",
    "optimizer": "#56b4e9",
    "gradients": "#009e73",
    "activations": "#e69f00",
    "communication": "#cc79a7",
    "temporaries": "#b0b0b0",
}
_PHASES = {"forward": "#8fb8d0", "pipeline": "#8fb8d0", "backward": "#d55e00", "optimizer": "#7f6a9c"}
_OTHER_PHASE = "#d9d9d9"
_LETTER = 7
"""Pixels of a letter, about."""


def memory_svg(records: Sequence[MemoryByCategory], title: str) -> str:
    """A panel for each record that has a timeline.

    Args:
        records: of one rank.
    """
    shown = [one for one in records if one.timeline.places]
    most = max((max(one.timeline.totals) for one in shown), default=0)
    scale = Scale(0.0, 1.05 * most or 1.0)
    present = [name for name in CATEGORIES if any(any(one.timeline.live[name]) for one in shown)]
    elements = [text(16, 26, title, size=16), *_legend(present)]
    y = float(_TOP)
    for one in shown:
        elements += _panel(one, scale, y)
        y += _HEIGHT + _STRIP + _GAP
    words = "; ".join(f"{one.source}: {bytes_words(one.peak_bytes)} at the peak" for one in shown)
    return document(_LEFT + _PLOT + _RIGHT, y, f"{title}: live bytes over one step, {words}", elements)


def _legend(names: Sequence[str]) -> Iterator[str]:
    x = 16.0
    for name in names:
        yield rectangle(x, 40, 12, 12, _COLOURS[name])
        yield text(x + 16, 51, name, size=11)
        x += 32 + _LETTER * len(name)


def _panel(one: MemoryByCategory, scale: Scale, top: float) -> Iterator[str]:
    timeline, bottom = one.timeline, top + _HEIGHT
    last = timeline.places[-1] or 1.0
    # The last point lasts as long as the mean of those before it.
    end = last + last / max(len(timeline.places), 1)
    edges = [_LEFT + place / end * _PLOT for place in (*timeline.places, end)]
    yield text(_LEFT, top - 6, f"{one.source}, rank {one.rank}", size=12, weight="bold")
    for tick in scale.ticks(4):
        y = bottom - scale.share(tick) * _HEIGHT
        yield line(_LEFT, y, _LEFT + _PLOT, y, GRID, width=0.5)
        yield text(_LEFT - 6, y + 4, bytes_words(round(tick)), anchor="end", size=10, fill=MUTED)
    below = [0] * len(timeline.places)
    for name in CATEGORIES:
        values = timeline.live[name]
        if not any(values):
            continue
        above = [low + value for low, value in zip(below, values, strict=True)]
        tip = f"{one.source} {name}: at most {bytes_words(one.own_peaks[name])}"
        yield path(_area(edges, below, above, scale, bottom), _COLOURS[name], tip)
        below = above
    peak = bottom - scale.share(one.peak_bytes) * _HEIGHT
    yield line(_LEFT, peak, _LEFT + _PLOT, peak, INK, dash="4 3")
    words = f"peak {bytes_words(one.peak_bytes)}, {one.phase}"
    yield text(_LEFT + _PLOT, peak - 4, words, anchor="end", size=10)
    yield from _strip(timeline, edges, bottom + 3)
    axis = f"{tick_words(round(last, 3))} {timeline.unit}"
    yield text(_LEFT, bottom + _STRIP + 18, "0", size=10, fill=MUTED)
    yield text(_LEFT + _PLOT, bottom + _STRIP + 18, axis, anchor="end", size=10, fill=MUTED)


def _area(
    edges: Sequence[float], below: Sequence[int], above: Sequence[int], scale: Scale, bottom: float
) -> str:
    """A band of steps: out along its upper side, back along the lower."""

    def place(value: float) -> float:
        return bottom - scale.share(value) * _HEIGHT

    points: list[tuple[float, float]] = []
    for index, value in enumerate(above):
        points += [(edges[index], place(value)), (edges[index + 1], place(value))]
    for index in range(len(below) - 1, -1, -1):
        points += [(edges[index + 1], place(below[index])), (edges[index], place(below[index]))]
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points) + "Z"


def _strip(timeline: Timeline, edges: Sequence[float], y: float) -> Iterator[str]:
    """Which phase of the step is where."""
    for phase, group in groupby(range(len(timeline.places)), key=lambda index: timeline.phases[index]):
        indices = list(group)
        left, right = edges[indices[0]], edges[indices[-1] + 1]
        yield rectangle(left, y, right - left, _STRIP - 3, _PHASES.get(phase, _OTHER_PHASE), phase)
        if right - left > _LETTER * len(phase):
            yield text((left + right) / 2, y + _STRIP - 5, phase, anchor="middle", size=9)
