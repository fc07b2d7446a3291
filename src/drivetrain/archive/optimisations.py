"""The optimisation records of a run: read from the events that hold them, and completed when the run has ended."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.archive.atomic import write_json
from drivetrain.archive.encoding import read_document
from drivetrain.archive.reader import Run
from drivetrain.archive.writer import append_event
from drivetrain.errors import RunError
from drivetrain.measure.optimisation import OptimisationRecord

__all__ = ["KIND", "add_evidence", "latest_records", "records_of"]

KIND = "optimisation"
"""Kind of the events. Each is the document of one record and ``when`` it was made: ``start`` (of a segment), ``window``
(the evidence of a profiled window, appended when the run has ended) or ``end`` (what only the end of the run shows)."""


def records_of(run: Run) -> tuple[OptimisationRecord, ...]:
    """What became of each optimisation in the last segment of ``run``, by name; the newest word on each.

    Evidence is None where no window of that segment was profiled, or its traces could not be read. Empty for a
    segment that wrote no records (yet), and for runs that were made before there were any.

    Raises:
        RunError: the events are damaged.
    """
    return latest_records(run.events(), run.last_segment(), where=str(run.path / "events.jsonl"))


def latest_records(
    events: Sequence[Mapping[str, Any]], segment: int | None, *, where: str = "events.jsonl"
) -> tuple[OptimisationRecord, ...]:
    """The newest record of each name that ``segment`` started with, from ``events`` in the order they were written."""
    found: dict[str, OptimisationRecord] = {}
    for event in events:
        if event["kind"] != KIND:
            continue
        record, when = _record(event, where)
        if when == "start":
            if event["segment"] == segment:
                found[record.name] = record
            else:
                # What follows until the next start is of another segment.
                found.pop(record.name, None)
        elif record.name in found:
            evidence = record.evidence or found[record.name].evidence
            found[record.name] = dataclasses.replace(record, evidence=evidence)
    return tuple(found[name] for name in sorted(found))


def add_evidence(run: Run, records: Sequence[OptimisationRecord], findings: Sequence[str]) -> dict[str, Any]:
    """Append ``records`` with the evidence of a window to the events of a run that has ended, and to its summary.

    Args:
        run: nobody writes to it any more.
        records: of the last segment, by name.
        findings: lines for the summary; each is a warning event as well.

    Returns:
        The keys of the summary that have become others: ``optimisations`` and ``findings``.

    Raises:
        RunError: the run has no summary.
        EnvironmentFault: a file cannot be written.
    """
    for record in records:
        append_event(run.path, KIND, when="window", **record.to_document())
    for finding in findings:
        append_event(run.path, "warning", message=finding)
    path = run.path / "summary.json"
    try:
        # As it is on the disk: non-finite figures stay encoded.
        summary = read_document(path)
    except FileNotFoundError:
        raise RunError(f"{run.path} has no summary to which evidence could be added") from None
    changed: dict[str, Any] = {
        "optimisations": [record.to_document() for record in records],
        "findings": [*summary.get("findings", []), *findings],
    }
    write_json(path, {**summary, **changed})
    return changed


def _record(event: Mapping[str, Any], where: str) -> tuple[OptimisationRecord, str]:
    try:
        return OptimisationRecord.from_document(event), str(event["when"])
    except KeyError as error:
        raise RunError(f"{where} is damaged: an optimisation's record without {error}") from error
