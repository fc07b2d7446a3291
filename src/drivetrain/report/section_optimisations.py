"""The optimisation record: what was asked for, what became of it, and what proves it."""

from collections.abc import Sequence

from drivetrain.measure.optimisation import OptimisationRecord
from drivetrain.report.blocks import Block, Cell, Paragraph, Table
from drivetrain.report.ladder_rows import value_in_words

__all__ = ["optimisations_section", "without_effect"]


def without_effect(records: Sequence[OptimisationRecord]) -> list[Block]:
    """What was requested and is not in effect, in one sentence; nothing where all of it is."""
    names = [record.name for record in records if record.without_effect]
    return [Paragraph(f"Requested and without effect: {', '.join(names)}.", "bad")] if names else []


def optimisations_section(records: Sequence[OptimisationRecord]) -> list[Block]:
    """A row each; what is without effect first, and said above the table."""
    if not records:
        return [Paragraph("This run holds no optimisation records.", "muted")]
    order = sorted(records, key=lambda record: (not record.without_effect, not record.requested, record.name))
    rows = [
        [
            Cell(record.name, "bad" if record.without_effect else "plain"),
            Cell(f"{record.field}={value_in_words(record.value)}", code=True, whole=True),
            _yes(record.requested),
            _active(record),
            _evidence(record),
            Cell(record.reason or "-", "plain" if record.reason else "muted"),
        ]
        for record in order
    ]
    table = Table(["optimisation", "field", "requested", "active", "evidence", "reason"], rows)
    return [*without_effect(records), table]


def _yes(said: bool) -> Cell:
    return Cell("yes") if said else Cell("no", "muted")


def _active(record: OptimisationRecord) -> Cell:
    if record.requested and not record.active:
        return Cell("no", "bad")
    return _yes(record.active)


def _evidence(record: OptimisationRecord) -> Cell:
    if record.evidence is None:
        return Cell("no window was profiled", "muted")
    kind = record.evidence.kind
    if kind == "absent" and record.requested:
        return Cell("absent", "bad", record.evidence.why)
    return Cell(kind, "good" if kind == "shown" else "muted", record.evidence.why)
