"""Where the time of the newest profiled window went: the waterfall and the classes, from ``account.json``."""

from collections.abc import Mapping
from typing import Any

from drivetrain.measure.account import CLASSES
from drivetrain.measure.waterfall import Bar, Waterfall
from drivetrain.report.blocks import Block, Bullets, Cell, Figure, Paragraph, Table
from drivetrain.report.run_records import RunRecords
from drivetrain.report.waterfall import waterfall_svg, waterfall_text

__all__ = ["account_section", "waterfall_of"]

_DAMAGED = (KeyError, TypeError, ValueError, AttributeError)
_MOST_RANKS = 8


def account_section(records: RunRecords) -> list[Block]:
    """The waterfall; without an account how one is made, with a damaged one what is wrong."""
    entry = records.account
    if entry is None:
        return [Paragraph(f"No account of this run: {_remedy(records)}", "muted")]
    try:
        document = entry["account"]
        made = waterfall_of(document["waterfall"]) if document["waterfall"] is not None else None
        blocks: list[Block] = []
        if made is not None:
            blocks.append(Figure(waterfall_svg(made, "Waterfall"), waterfall_text(made)))
        else:
            blocks.append(Paragraph("The window has no length, so it has no waterfall.", "doubtful"))
        blocks += [*_health(document), _classes(document)]
        table = entry.get("name_table")
        if isinstance(table, str):
            blocks.append(Paragraph(f"Names classed by tables {table}.", "muted"))
    except _DAMAGED as error:
        return [Paragraph(f"The account of this run is damaged ({error!r}); {_remedy(records)}", "bad")]
    return blocks


def _remedy(records: RunRecords) -> str:
    config = records.run.path / "config.toml"
    return f"a profiled run of the same configuration has one; make it with: drivetrain profile {config}"


def waterfall_of(document: Mapping[str, Any]) -> Waterfall:
    """The waterfall that :meth:`drivetrain.measure.waterfall.Waterfall.to_document` wrote.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    bars = tuple(
        Bar(str(bar["name"]), bar["kind"], float(bar["points"]), bar["class"]) for bar in document["bars"]
    )
    if not bars:
        raise ValueError("a waterfall without bars")
    return Waterfall(
        unit=document["unit"],
        bars=bars,
        mfu=document["mfu"],
        effective_mfu=document["effective_mfu"],
        reason=document["reason"],
        problems=tuple(map(str, document["problems"])),
        peak_source=document["peak_source"],
        achievable_source=document["achievable_source"],
        flops_rule=document["flops_rule"],
        token_rule=document["token_rule"],
        window=str(document["window"]),
    )


def _health(document: Mapping[str, Any]) -> list[Block]:
    items = []
    for finding in document["health"]:
        withheld = ", ".join(finding.get("affects") or ())
        note = f"withheld: {withheld}" if withheld else ""
        tone = {"error": "bad", "warning": "doubtful"}.get(finding["severity"], "muted")
        items.append(Cell(f"{finding['severity']}: {finding['message']}", tone, note))  # type: ignore[arg-type]
    return [Bullets(items)] if items else []


def _classes(document: Mapping[str, Any]) -> Table:
    """Milliseconds of each class by rank, over everything that was recorded."""
    ranks = document["ranks"][:_MOST_RANKS]
    left_out = len(document["ranks"]) - len(ranks)
    wholes = [rank["whole"] for rank in ranks]
    names = [name for name in CLASSES if any(whole["classes"].get(name) for whole in wholes)]
    rows = [(name, [whole["classes"].get(name, 0) for whole in wholes]) for name in names]
    rows += [
        (label, [whole[key] for whole in wholes])
        for label, key in (
            ("unexplained", "unexplained_ns"),
            ("window", "window_ns"),
            ("busy", "busy_ns"),
            ("communication", "communication_ns"),
            ("exposed communication", "exposed_communication_ns"),
        )
    ]
    more = f"; {left_out} more ranks are in account.json" if left_out else ""
    return Table(
        ["ms", *(f"rank {rank['rank']}" for rank in ranks)],
        [
            [Cell(name), *(Cell("withheld" if value is None else f"{value / 1e6:,.3f}") for value in values)]
            for name, values in rows
        ],
        frozenset(range(1, len(ranks) + 1)),
        folded=f"Classes by rank, whole recording{more}",
    )
