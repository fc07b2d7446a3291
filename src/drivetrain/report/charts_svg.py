"""The three charts of a diagnosis as figures: columns over the steps, and rows of kernels."""

from collections.abc import Iterator, Sequence

from drivetrain.diagnose.charts import BAD, GOOD, ChartedKernel, KernelChart, StepChart, StepRow
from drivetrain.report.axes import Scale
from drivetrain.report.charts_text import achieved_words, middle_cut, rows_words, short_name
from drivetrain.report.palette import colour_of, group_of
from drivetrain.report.svg import GRID, INK, MUTED, document, legend, line, rectangle, text

__all__ = ["communication_svg", "data_gap_svg", "kernels_svg"]

_LEFT, _PLOT, _RIGHT, _TOP, _HEIGHT = 96, 828, 36, 66, 170
_WIDTH = _LEFT + _PLOT + _RIGHT
_WIDEST = 46
_TAGGED = "#b0b0b0"
_HIDDEN = "#f3d9a6"
_BAD = "#b3121d"
_KERNEL_ROW, _NAME = 40, 92


def data_gap_svg(chart: StepChart) -> str:
    """Columns of the share of each step in which it waited for its batch."""
    assert chart.share is not None
    colour = colour_of("class", "data")
    words = f"Data gap: {chart.share:.1%} of a step on average"
    meanings = [(colour, "waiting for the batch"), (_TAGGED, "a step with a tag, no part of the mean")]
    return _columns(chart, words, "waiting for the batch, share of the step", colour, meanings)


def communication_svg(chart: StepChart) -> str:
    """Columns of exposed communication, hidden communication above it, and the borders of good and bad."""
    assert chart.share is not None
    colour = colour_of("class", "communication")
    words = f"Communication: {chart.share:.1%} of a step is exposed on average"
    meanings = [
        (colour, "exposed"),
        (_HIDDEN, "hidden under compute"),
        (_TAGGED, "exposed, in a step with a tag"),
    ]
    return _columns(
        chart,
        words,
        f"communication, share of the step; dashed: good below {GOOD:.0%}, bad above {BAD:.0%}",
        colour,
        meanings,
        borders=(GOOD, BAD),
        hides=True,
    )


def _columns(
    chart: StepChart,
    words: str,
    title: str,
    colour: str,
    meanings: Sequence[tuple[str, str]],
    *,
    borders: Sequence[float] = (),
    hides: bool = False,
) -> str:
    rows = chart.rows
    most = max(row.share + (_hidden(row) if hides else 0.0) for row in rows)
    scale = Scale(
        0.0, next((end for end in (0.1, 0.3, 0.5) if max(most, *borders, 0.05) <= end), max(1.0, most))
    )
    bottom = _TOP + _HEIGHT
    shown = [entry for entry in meanings if entry[0] != _TAGGED or any(row.tags for row in rows)]
    elements = [
        *legend(shown, _LEFT, 10, _LEFT + _PLOT, size=12)[0],
        text(_LEFT, _TOP - 10, title, size=12, fill=MUTED),
    ]
    for tick in scale.ticks(4):
        y = bottom - scale.share(tick) * _HEIGHT
        elements.append(line(_LEFT, y, _LEFT + _PLOT, y, GRID, width=0.5))
        elements.append(text(_LEFT - 8, y + 4, f"{tick:.0%}", anchor="end", size=11, fill=MUTED))
    pitch = min(_PLOT / len(rows), _WIDEST + 8)
    width = max(pitch * (0.86 if pitch > 4 else 1.0), 1.0)
    for index, row in enumerate(rows):
        x = _LEFT + index * pitch + (pitch - width) / 2
        height = scale.share(row.share) * _HEIGHT
        tip = _tip(row, hides, chart.is_step)
        elements.append(rectangle(x, bottom - height, width, height, _TAGGED if row.tags else colour, tip))
        if hides and _hidden(row):
            above = scale.share(row.share + _hidden(row)) * _HEIGHT - height
            elements.append(rectangle(x, bottom - height - above, width, above, _HIDDEN, tip))
    elements.append(line(_LEFT, bottom, _LEFT + _PLOT, bottom, MUTED))
    for border in borders:
        y = bottom - scale.share(border) * _HEIGHT
        elements.append(line(_LEFT, y, _LEFT + _PLOT, y, INK, dash="4 3"))
        # Beside the columns: on them it could not be read.
        elements.append(text(_LEFT + _PLOT + 4, y + 4, f"{border:.0%}", size=11))
    elements += _step_labels(rows, pitch, bottom, is_step=chart.is_step)
    return document(_WIDTH, bottom + 34, words, elements)


def _hidden(row: StepRow) -> float:
    return sum((row.hidden_ns or {}).values()) / row.step_ns if row.step_ns else 0.0


def _tip(row: StepRow, hides: bool, is_step: bool) -> str:
    what = (f"step {rows_words(row)}" if row.count == 1 else f"steps {rows_words(row)}") if is_step else "all"
    exposed = f"{row.lost_ns / 1e6:,.2f} of {row.step_ns / 1e6:,.2f} ms, {row.share:.1%}"
    hidden = ""
    if hides:
        known = row.hidden_ns is not None
        hidden = (
            f", hidden {sum((row.hidden_ns or {}).values()) / 1e6:,.2f} ms" if known else ", hidden unknown"
        )
    worst = f"; the most {row.worst_share:.1%} in step {row.worst_step}" if row.count > 1 else ""
    return f"{what}: {exposed}{hidden}{worst}" + (f" ({', '.join(row.tags)})" if row.tags else "")


def _step_labels(rows: Sequence[StepRow], pitch: float, bottom: float, *, is_step: bool) -> Iterator[str]:
    if not is_step:
        yield text(_LEFT, bottom + 20, "the whole trace: no steps were found in it", size=11, fill=MUTED)
        return
    yield text(_LEFT - 8, bottom + 20, "step", anchor="end", size=11)
    # A label needs about as much room as its digits.
    digits = max(len(f"{row.first:,}") for row in rows)
    stride = max(1, -(-int(8 * digits + 12) // max(int(pitch), 1)))
    for index in range(0, len(rows), stride):
        x = _LEFT + (index + 0.5) * pitch
        yield text(x, bottom + 20, f"{rows[index].first:,}", anchor="middle", size=11, fill=MUTED)


def kernels_svg(chart: KernelChart) -> str:
    """Two lines each: the name, and what it took; the bar is its share of the summed time."""
    assert chart.kernels
    unit = "a step" if chart.is_step else "in all"
    groups = list(dict.fromkeys(group_of(one.kernel.kind) for one in chart.kernels))
    entries = [(colour_of("class", group), group) for group in groups]
    elements, used = legend(entries, 16, 10, _WIDTH - 16, size=12)
    longest = max(one.kernel.share for one in chart.kernels)
    top = 22.0 + used
    for one in chart.kernels:
        elements += _kernel(one, longest, top, unit)
        top += _KERNEL_ROW + (14 if one.kernel.fallback is not None else 0)
    words = "Kernels with the most time: " + "; ".join(
        f"{one.kernel.name[:60]} {one.kernel.share:.1%}" for one in chart.kernels[:3]
    )
    return document(_WIDTH, top + 8, words, elements)


def _kernel(one: ChartedKernel, longest: float, top: float, unit: str) -> Iterator[str]:
    kernel = one.kernel
    width = (_PLOT / 4) * (kernel.share / longest if longest else 0.0)
    name = middle_cut(short_name(kernel.name), _NAME)
    yield text(16, top + 13, f"{kernel.share:.1%}", size=12, weight="bold")
    yield rectangle(
        70, top + 3, width, 12, colour_of("class", kernel.kind), f"{kernel.name}: {kernel.share:.1%}"
    )
    yield text(70 + _PLOT / 4 + 14, top + 13, name, size=11)
    words = f"{one.ns / 1e6:,.3f} ms {unit}, {one.calls:,.4g} calls, {kernel.kind}, {achieved_words(one)}"
    if one.of_ceiling is not None:
        words += " of the ceiling"
    yield text(70 + _PLOT / 4 + 14, top + 29, words, size=11, fill=MUTED)
    if kernel.fallback is not None:
        yield text(70 + _PLOT / 4 + 14, top + 43, f"fallback: {kernel.fallback}", size=11, fill=_BAD)
