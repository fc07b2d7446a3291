"""What a run changed against its parent: the declared change, and every leaf that really differs."""

from collections.abc import Iterator, Mapping
from typing import Any

from drivetrain.archive.compare import compare_runs
from drivetrain.errors import DrivetrainError
from drivetrain.report.blocks import Block, Bullets, Cell, Facts, Paragraph, Table
from drivetrain.report.ladder_rows import change_in_words, value_in_words
from drivetrain.report.run_records import RunRecords

__all__ = ["changes_section"]

_IDENTITY = ("schema", "run.name", "run.runs_dir")
"""Leaves in which any two runs differ."""


def changes_section(records: RunRecords) -> list[Block]:
    """The change that was declared, the leaves that differ, and the reservations of the comparison."""
    declared = records.manifest.get("change")
    change: Mapping[str, Any] = declared if isinstance(declared, dict) else {}
    if records.parent is None:
        if not change:
            return [Paragraph(f"Nothing to compare with: {records.parent_note}.", "muted")]
        return [
            Facts([("declared change", Cell(change_in_words(change), code=True))]),
            Paragraph(f"{records.parent_note}, so that only the declared change is known.", "doubtful"),
        ]
    parent = records.parent
    facts = [
        (
            "parent",
            Cell(parent.run.path.name, code=True, note=f"{parent.status}, {parent.reason}".strip(", ")),
        ),
        ("declared change", Cell(change_in_words(change), code=True)),
    ]
    blocks: list[Block] = [Facts(facts)]
    differences = list(_differences(parent.configuration, records.configuration))
    if parent.configuration and records.configuration:
        blocks += _leaves(differences, change)
    blocks += _reservations(records, parent)
    return blocks


def _leaves(differences: list[tuple[str, Any, Any]], change: Mapping[str, Any]) -> list[Block]:
    missing = sorted(change.keys() - {leaf for leaf, _, _ in differences})
    blocks: list[Block] = []
    if differences:
        rows = [
            [
                Cell(leaf, code=True, whole=True),
                Cell(value_in_words(before)),
                Cell(value_in_words(after)),
                Cell("yes") if leaf in change else Cell("no", "doubtful"),
            ]
            for leaf, before, after in differences
        ]
        blocks.append(Table(["leaf", "parent", "this run", "declared"], rows))
    else:
        blocks.append(Paragraph("The configurations do not differ."))
    undeclared = [leaf for leaf, _, _ in differences if leaf not in change]
    if change and undeclared:
        text = f"Differs without being declared: {', '.join(undeclared)}. The comparison is of more than one change."
        blocks.append(Paragraph(text, "doubtful"))
    if missing:
        blocks.append(Paragraph(f"Declared, and yet the same in both: {', '.join(missing)}.", "doubtful"))
    return blocks


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ between two configurations as they are in the files, whatever schema wrote them."""
    first, second = dict(_flat(before)), dict(_flat(after))
    for leaf in dict.fromkeys([*first, *second]):
        if leaf not in _IDENTITY and first.get(leaf) != second.get(leaf):
            yield leaf, first.get(leaf), second.get(leaf)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _reservations(records: RunRecords, parent: RunRecords) -> list[Block]:
    """Why (a part of) the comparison does not hold, and in what the machines differ."""
    try:
        comparison = compare_runs([parent.run, records.run])
    except (DrivetrainError, OSError, KeyError, TypeError, ValueError) as error:
        return [Paragraph(f"Beyond the configuration the two are not compared: {error}", "doubtful")]
    blocks: list[Block] = []
    if comparison.environment:
        rows = [
            [Cell(key, code=True), *(Cell(value_in_words(value)) for value in values)]
            for key, values in comparison.environment.items()
        ]
        blocks.append(
            Table(
                ["fact", "parent", "this run"],
                rows,
                folded=f"Code and machine: {len(rows)} facts differ",
            )
        )
    if comparison.warnings:
        blocks.append(Bullets([Cell(warning, "doubtful") for warning in comparison.warnings]))
    return blocks
