"""The three charts of a diagnosis for a terminal of any width from 60 columns: bars of a step, rows of kernels."""

import re
from collections.abc import Iterator, Sequence

from drivetrain.diagnose.charts import (
    BAD,
    GOOD,
    ChartedKernel,
    Charts,
    KernelChart,
    StepChart,
    StepRow,
    communication_verdict,
)
from drivetrain.report.palette import colour_of
from drivetrain.report.styled import Line, Span, line

__all__ = [
    "achieved_words",
    "charts_lines",
    "communication_lines",
    "data_gap_lines",
    "kernel_lines",
    "middle_cut",
    "rows_words",
]

_ROWS = 16
"""Rows of a chart over the steps: all of them fit on one screen."""
_TAG = 11
"""Columns beside a bar, for the tag of its steps."""
_EXPOSED, _HIDDEN = "█", "░"
_VERDICT_STYLE = {"good": "good", "fair": "doubtful", "bad": "bad"}


def charts_lines(charts: Charts, width: int = 80) -> list[Line]:
    """All three, one below the other."""
    return [
        *data_gap_lines(charts.data_gap, width),
        (),
        *kernel_lines(charts.kernels, width),
        (),
        *communication_lines(charts.communication, width),
    ]


def rows_words(row: StepRow) -> str:
    """Which steps a row is of."""
    return str(row.first) if row.first == row.last else f"{row.first}-{row.last}"


def _heading(title: str, source: str, width: int) -> Iterator[Line]:
    yield line(title, "bold")
    if source:
        yield line(f"  {source}"[:width], "dim")


def data_gap_lines(chart: StepChart, width: int = 80) -> Iterator[Line]:
    """What each step waited for its batch."""
    yield from _heading("Data gap: what each step waits for its batch", _source(chart), width)
    if chart.withheld is not None:
        yield from _withheld(chart.withheld)
        return
    yield from _rows(chart, width, colour_of("class", "data"))
    assert chart.share is not None
    yield line(f"  mean {chart.share:.1%} of a step{_untagged(chart)}{_worst(chart)}")


def communication_lines(chart: StepChart, width: int = 80) -> Iterator[Line]:
    """What of each step's communication was exposed, and what was hidden."""
    yield from _heading("Communication share: exposed against hidden", _source(chart), width)
    if chart.withheld is not None:
        yield from _withheld(chart.withheld)
        return
    yield from _rows(chart, width, colour_of("class", "communication"), borders=(GOOD, BAD), hides=True)
    assert chart.share is not None
    word = communication_verdict(chart.share)
    yield (
        Span(f"  exposed, mean {chart.share:.1%} of a step: "),
        Span(word, _VERDICT_STYLE[word]),
        Span(f" (good below {GOOD:.0%}, bad above {BAD:.0%}){_untagged(chart)}{_worst(chart)}"),
    )
    yield line(f"  {_EXPOSED} exposed   {_HIDDEN} hidden under compute", "dim")
    yield from _groups(chart)


def _withheld(why: str) -> Iterator[Line]:
    yield line(f"  withheld: {why}", "doubtful")


def _source(chart: StepChart) -> str:
    return "; ".join(filter(None, (chart.source, chart.note)))


def _untagged(chart: StepChart) -> str:
    """How many rows the mean leaves out."""
    left = sum(row.count for row in chart.rows if row.tags)
    return f", {left} tagged step{'s' if left > 1 else ''} left out" if 0 < left < _steps(chart) else ""


def _steps(chart: StepChart) -> int:
    return sum(row.count for row in chart.rows)


def _worst(chart: StepChart) -> str:
    plain = [row for row in chart.rows if not row.tags] or list(chart.rows)
    if not chart.is_step or len(plain) < 2:
        return ""
    worst = max(plain, key=lambda row: row.worst_share)
    return f"; the most is {worst.worst_share:.1%}, step {worst.worst_step}"


def _rows(
    chart: StepChart, width: int, colour: str, *, borders: Sequence[float] = (), hides: bool = False
) -> Iterator[Line]:
    """A bar each: what is lost of the step, all bars on one scale of the step's whole length."""
    rows = chart.merged(_ROWS)
    label = max([4, *(len(rows_words(row)) for row in rows)])
    room = max(width - label - 21 - _TAG, 10)
    scale = _scale(rows, hides)
    yield line(f"  {'step':>{label}} {'ms':>9} {'share':>6}  0%{f'{scale:.0%}':>{max(room - 2, 4)}}", "dim")
    for row in rows:
        name = rows_words(row) if chart.is_step else "all"
        lost = _cells(row.share, scale, room)
        hidden = _cells(_hidden_share(row), scale, room - lost) if hides else 0
        rest = list(" " * (room - lost - hidden))
        for border in borders:
            place = round(border / scale * room) - lost - hidden
            if 0 <= place < len(rest):
                rest[place] = "|"
        tags = f" {row.tags[0]}" if row.tags else ""
        yield (
            Span(f"  {name:>{label}} {row.lost_ns / 1e6:9,.2f} {row.share:6.1%}  "),
            Span(_EXPOSED * lost, colour),
            Span(_HIDDEN * hidden, "dim"),
            Span("".join(rest), "dim"),
            Span(tags[: max(width - label - room - 21, 0)], "dim"),
        )


def _scale(rows: Sequence[StepRow], hides: bool) -> float:
    """The right end of the bars: a round share that holds all of them, and the borders."""
    most = max((row.share + (_hidden_share(row) if hides else 0.0) for row in rows), default=0.0)
    return next((end for end in (0.3, 0.5) if most <= end), max(1.0, most))


def _hidden_share(row: StepRow) -> float:
    if row.hidden_ns is None or not row.step_ns:
        return 0.0
    return sum(row.hidden_ns.values()) / row.step_ns


def _cells(share: float, scale: float, room: int) -> int:
    """Length of a bar; something that is there is at least one cell."""
    if share <= 0 or room <= 0:
        return 0
    return min(max(round(share / scale * room), 1), room)


def _groups(chart: StepChart) -> Iterator[Line]:
    """Means by group of ranks."""
    plain = [row for row in chart.rows if not row.tags] or list(chart.rows)
    count = sum(row.count for row in plain)
    for name in chart.groups:
        exposed = sum(row.by_group.get(name, 0.0) * row.count for row in plain) / count
        words = f"  {name}: {exposed / 1e6:,.2f} ms exposed"
        if all(row.hidden_ns is not None for row in plain):
            hidden = sum((row.hidden_ns or {}).get(name, 0.0) * row.count for row in plain) / count
            whole = exposed + hidden
            share = f", {hidden / whole:.0%} of it hidden" if whole else ""
            words += f", {hidden / 1e6:,.2f} ms hidden{share}"
        else:
            words += ", how much is hidden is not known"
        yield line(words)


# ---- kernels ----------------------------------------------------------------------------------------------------


def kernel_lines(chart: KernelChart, width: int = 80) -> Iterator[Line]:
    """The kernels with the most time, two lines each."""
    what = "Kernels" if chart.on_device or chart.withheld else "Operators"
    unit = "a step" if chart.is_step else "of the whole trace"
    yield from _heading(f"{what} with the most time", f"{chart.source}, {unit}", width)
    if chart.withheld is not None:
        yield from _withheld(chart.withheld)
        return
    yield line(f"  {'ms':>9} {'calls':>8} {'share':>6}  {'class':<21} achieved, of ceiling"[:width], "dim")
    reasons = {one.kernel.unknown for one in chart.kernels}
    same = reasons.pop() if len(reasons) == 1 else None
    for one in chart.kernels:
        yield (
            Span(f"  {one.ns / 1e6:9,.2f} {one.calls:8,.4g} {one.kernel.share:6.1%}  "),
            Span(f"{one.kernel.kind:<21}", colour_of("class", one.kernel.kind)),
            Span(f" {achieved_words(one) if same is None else '-'}"),
        )
        yield line(f"    {middle_cut(short_name(one.kernel.name), width - 4)}", "dim")
        if one.kernel.fallback is not None:
            yield line(f"    FALLBACK: {one.kernel.fallback}"[:width], "bad")
    if same is not None:
        yield line(f"  achieved: unknown, {same}", "dim")
    rest = chart.names - len(chart.kernels)
    more = f"; {rest} others take the rest" if rest else ""
    yield line(f"  shown: {chart.shown_share:.1%} of the summed time{more}")
    yield from _legend(chart.kernels)


def achieved_words(one: ChartedKernel) -> str:
    """The rate that a kernel reached, or why it is unknown: ``1.23 TFLOP/s, 61%``."""
    work = one.kernel.work
    if work is None:
        return one.kernel.unknown or "unknown"
    rate = _rate(work.per_second, work.unit)
    share = one.of_ceiling
    return rate if share is None else f"{rate}, {share:.0%}"


def _rate(per_second: float, unit: str) -> str:
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if per_second >= factor:
            return f"{per_second / factor:.3g} {letter}{unit}/s"
    return f"{per_second:.3g} {unit}/s"


def _legend(kernels: Sequence[ChartedKernel]) -> Iterator[Line]:
    ceilings: dict[str, str] = {}
    for one in kernels:
        if one.ceiling is not None and one.kernel.work is not None:
            unit = one.kernel.work.unit
            of = "" if one.kernel.work.dtype is None else f" in {one.kernel.work.dtype}"
            ceilings.setdefault(
                f"{unit}{of}", f"{_rate(one.ceiling.per_second, unit)}{of}, {one.ceiling.source}"
            )
    for words in ceilings.values():
        yield line(f"  ceiling: {words}", "dim")
    known = [one for one in kernels if one.kernel.work is not None]
    if known and not ceilings:
        yield line("  no ceiling is known: give --device, or measure this machine (drivetrain bench)", "dim")
    if any(one.kernel.work is not None and one.kernel.work.unit == "B" for one in kernels):
        yield line("  B/s are by shapes: what a cache serves counts too, and may exceed memory", "dim")


_NOISE = re.compile(r"^void |at::native::|at::detail::|c10::|\(anonymous namespace\)::")


def short_name(name: str) -> str:
    """The name of a kernel without namespaces and the list of its parameters, which tell nothing apart."""
    if name.endswith(")"):
        depth = 0
        for place in range(len(name) - 1, 0, -1):
            depth += (name[place] == ")") - (name[place] == "(")
            if depth == 0:
                name = name[:place]
                break
    return _NOISE.sub("", name)


def middle_cut(name: str, width: int) -> str:
    """A long name without its middle: kernels differ at both ends."""
    if len(name) <= width:
        return name
    left = (width - 1) * 2 // 3
    return f"{name[:left]}…{name[len(name) - (width - 1 - left) :]}"
