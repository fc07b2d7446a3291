"""Where each rank's steps went: a row for each step, its classes side by side, all rows on one scale."""

from collections.abc import Iterator

from drivetrain.measure.account import CLASSES, Account, RankAccount, Window
from drivetrain.report.palette import colour_of, group_of
from drivetrain.report.svg import MUTED, document, legend, rectangle, text

__all__ = ["MOST_ROWS", "timeline_svg"]

MOST_ROWS = 64
"""A figure of more rows cannot be read; the ranks shown are then named."""

_ROW, _LABEL, _PLOT, _TOP = 18, 146, 680, 64


def timeline_svg(account: Account, title: str) -> str:
    """A row for each rank and step, or for the whole window of a rank without steps."""
    rows = [row for rank in account.ranks for row in _rows(rank)]
    shown = rows[:MOST_ROWS]
    longest = max((window.window_ns for _, window in shown), default=0)
    present = [name for name in CLASSES if any(window.classes.get(name) for _, window in shown)]
    groups = list(dict.fromkeys(group_of(name) for name in present))
    if any(window.unexplained_ns for _, window in shown):
        groups.append("unexplained")
    entries, used = legend(
        [(colour_of("class", group), group) for group in groups], 16, 38, _LABEL + _PLOT + 24
    )
    top = _TOP - 18 + used
    height = top + _ROW * len(shown) + 48
    cut = f", {len(shown)} of {len(rows)} rows" if len(shown) < len(rows) else ""
    elements = [text(16, 24, title, size=16), *entries]
    scale = _PLOT / longest if longest else 0.0
    for index, (label, window) in enumerate(shown):
        y = top + index * _ROW
        elements.append(text(_LABEL - 8, y + 13, label, anchor="end", size=11))
        x = float(_LABEL)
        for name, duration in [*_classes(window), ("unexplained", window.unexplained_ns)]:
            if duration:
                tip = f"{label}, {name}: {duration / 1e6:.3f} ms"
                elements.append(
                    rectangle(x, y + 2, duration * scale, _ROW - 4, colour_of("class", name), tip)
                )
                x += duration * scale
    elements.append(text(_LABEL, height - 24, "0 ms", size=11, fill=MUTED))
    elements.append(
        text(_LABEL + _PLOT, height - 24, f"{longest / 1e6:.2f} ms", anchor="end", size=11, fill=MUTED)
    )
    elements.append(
        text(
            16,
            height - 8,
            f"classes of a step in order of their kind, not of time{cut}",
            size=11,
            fill=MUTED,
        )
    )
    return document(_LABEL + _PLOT + 24, height, f"{title}: classes of each rank and step", elements)


def _rows(rank: RankAccount) -> Iterator[tuple[str, Window]]:
    if not rank.steps:
        yield f"rank {rank.rank}", rank.whole
    for step in rank.steps:
        yield f"rank {rank.rank} step {step.step}", step.window


def _classes(window: Window) -> Iterator[tuple[str, int]]:
    for name in CLASSES:
        if window.classes.get(name):
            yield name, window.classes[name]
