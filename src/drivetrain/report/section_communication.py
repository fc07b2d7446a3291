"""What collectives cost a step, by group: from the summary, and what ranks waited for each other from their files."""

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.archive.collective_waits import RunWaits, waits_of_run
from drivetrain.measure.collective_waits import GroupWaits
from drivetrain.report.blocks import Block, Cell, Paragraph, Table
from drivetrain.report.run_records import RunRecords

__all__ = ["communication_section"]


def communication_section(records: RunRecords) -> list[Block]:
    """Nothing for a run of one process, or one that recorded nothing of it."""
    found = (records.summary or {}).get("communication")
    blocks: list[Block] = []
    if isinstance(found, dict):
        blocks += [_totals(found, records), _table(found)]
        blocks.append(Paragraph(f"{str(found['rule'])[:1].upper()}{str(found['rule'])[1:]}.", "muted"))
    waits = waits_of_run(records.run)
    if waits is not None and waits.groups:
        blocks += _waits(waits)
    return blocks


def _totals(found: Mapping[str, Any], records: RunRecords) -> Paragraph:
    if found["overlap_frac"] is None:
        why = ((records.summary or {}).get("reasons") or {}).get("communication.overlap_frac")
        return Paragraph(f"How much of it is hidden is unknown: {why or 'nothing was under way'}.", "muted")
    return Paragraph(
        f"{found['overlap_frac']:.1%} of the time in which collectives were under way is hidden; the training "
        f"thread stands waiting for {found['exposed_frac']:.1%} of a step."
    )


def _table(found: Mapping[str, Any]) -> Table:
    rows = [
        [
            Cell(name),
            Cell(f"{group['calls']:,.4g}"),
            Cell(f"{group['bytes']:,.0f}"),
            *(_milliseconds(group[key]) for key in ("wire_s", "hidden_s", "exposed_s", "idle_s")),
        ]
        for name, group in found["groups"].items()
    ]
    headings = ["group", "calls", "bytes", "wire, ms", "hidden, ms", "exposed, ms", "idle, ms"]
    return Table(headings, rows, frozenset(range(1, 7)), caption="Collectives of a step of rank 0")


def _milliseconds(seconds: float | None) -> Cell:
    return Cell("unknown", "muted") if seconds is None else Cell(f"{seconds * 1e3:,.2f}")


def _waits(waits: RunWaits) -> list[Block]:
    rows = [_row(group, waits.steps) for group in waits.groups]
    headings = ["group", "ranks", "collectives", "wait, ms", "transfer, ms", "error, ms", "most often last"]
    caption = (
        "Waiting for the last rank and transfer in a step, mean over the group's ranks; collectives of all "
        f"{waits.steps} steady steps that every rank logged"
    )
    return [Table(headings, rows, frozenset(range(2, 6)), caption=caption)]


def _row(group: GroupWaits, steps: int) -> Sequence[Cell]:
    size = len(group.ranks)
    last, times = max(group.times_last.items(), key=lambda item: item[1])
    per_step = 1e-6 / steps
    return [
        Cell(group.group),
        Cell(", ".join(map(str, group.ranks[:8])) + (", …" if size > 8 else "")),
        Cell(f"{group.collectives:,}"),
        Cell(f"{sum(group.wait_ns.values()) / size * per_step:,.2f}"),
        Cell(f"{sum(group.transfer_ns.values()) / size * per_step:,.2f}"),
        Cell(f"{group.error_ns * per_step:,.2f}"),
        Cell(f"rank {last}, {times / group.collectives:.0%}"),
    ]
