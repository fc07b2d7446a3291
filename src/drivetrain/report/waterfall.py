"""The waterfall of MFU, as a figure and as text: from 100 points of peak down to what is left."""

import textwrap

from drivetrain.measure.waterfall import Bar, Waterfall
from drivetrain.report.palette import colour_of
from drivetrain.report.svg import GRID, MUTED, document, rectangle, text

__all__ = ["SMALLEST_BAR", "waterfall_svg", "waterfall_text"]

SMALLEST_BAR = 0.05
"""Bars below this many points are joined into one, said so: a row that cannot be seen tells nothing."""

_ROW, _LABEL, _VALUE, _PLOT = 22, 250, 70, 560
_TOP, _BOTTOM = 56, 40
_NOTE = 128
"""Letters of a line of notes that fit."""


def waterfall_svg(made: Waterfall, title: str) -> str:
    """A row a bar: each loss starts where the one before ended; what is MFU is at the bottom, from zero."""
    rows = _rows(made)
    unit = "MFU points" if made.unit == "mfu_points" else "% of time"
    # A note names its source, which may be long.
    notes = [piece for note in _notes(made) for piece in textwrap.wrap(note, _NOTE, subsequent_indent="   ")]
    height = _TOP + _ROW * len(rows) + _BOTTOM + 16 * len(notes)
    elements = [text(16, 24, title, size=16), text(16, 42, f"{made.window}, in {unit}", fill=MUTED)]
    scale = _PLOT / 100
    for tick in range(0, 101, 20):
        x = _LABEL + tick * scale
        elements.append(rectangle(x, _TOP - 4, 0.5, _ROW * len(rows) + 8, GRID))
        elements.append(
            text(x, _TOP + _ROW * len(rows) + 20, str(tick), anchor="middle", size=11, fill=MUTED)
        )
    remaining = 100.0
    for index, bar in enumerate(rows):
        y = _TOP + index * _ROW
        start = min(remaining, remaining - bar.points)
        width = abs(bar.points) * scale
        elements.append(text(_LABEL - 8, y + 15, bar.name, anchor="end"))
        tip = f"{bar.name}: {bar.points:.2f}"
        fill = colour_of(bar.kind, bar.class_name)
        elements.append(rectangle(_LABEL + start * scale, y + 3, max(width, 0.75), _ROW - 6, fill, tip))
        elements.append(text(_LABEL + _PLOT + 8, y + 15, f"{bar.points:.2f}"))
        remaining -= bar.points
    for index, note in enumerate(notes):
        elements.append(text(16, height - 10 - 16 * (len(notes) - 1 - index), note, size=11, fill=MUTED))
    label = f"{title}: " + ", ".join(f"{bar.name} {bar.points:.1f}" for bar in rows)
    return document(_LABEL + _PLOT + _VALUE, height, label, elements)


def waterfall_text(made: Waterfall, width: int = 40) -> str:
    """The same for a terminal of ``width`` columns of bar beside the labels."""
    rows = _rows(made)
    longest = max(len(bar.name) for bar in rows)
    unit = "MFU points" if made.unit == "mfu_points" else "% of time"
    lines = [f"{made.window}, in {unit}"]
    remaining = 100.0
    for bar in rows:
        start = max(0, min(width, round(min(remaining, remaining - bar.points) / 100 * width)))
        end = max(0, min(width, round(max(remaining, remaining - bar.points) / 100 * width)))
        block = "█" * max(end - start, 0) or "▏"
        lines.append(f"  {bar.name:<{longest}}  {bar.points:7.2f}  {' ' * start}{block}")
        remaining -= bar.points
    lines.extend(f"  {note}" for note in _notes(made))
    return "\n".join(lines)


def _rows(made: Waterfall) -> list[Bar]:
    """Losses in their order, what is too small to see joined, MFU last."""
    losses = [bar for bar in made.bars if bar.kind != "mfu"]
    small = [bar for bar in losses if 0 <= bar.points < SMALLEST_BAR]
    rows = [bar for bar in losses if bar not in small]
    if small:
        total = sum(bar.points for bar in small)
        rows.append(Bar(f"{len(small)} classes below {SMALLEST_BAR:g} each", "class", total))
    return rows + [bar for bar in made.bars if bar.kind == "mfu"]


def _notes(made: Waterfall) -> list[str]:
    notes = []
    if made.reason is not None:
        notes.append(made.reason)
    if made.peak_source is not None:
        notes.append(f"peak: {made.peak_source}")
    if made.achievable_source is not None:
        notes.append(f"achievable: {made.achievable_source}")
    if made.flops_rule is not None:
        notes.append(f"FLOPs: {made.flops_rule}")
    if made.effective_mfu is not None:
        notes.append(f"effective MFU (tokens that carry loss): {made.effective_mfu:.2f}")
    notes.extend(f"ERROR: {problem}" for problem in made.problems)
    return notes
