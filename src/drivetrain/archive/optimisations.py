"""The optimisation records of a run, from the events that hold them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.archive.reader import Run
from drivetrain.errors import RunError
from drivetrain.measure.optimisation import OptimisationRecord

__all__ = ["KIND", "latest_records", "records_of"]

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


def _record(event: Mapping[str, Any], where: str) -> tuple[OptimisationRecord, str]:
    try:
        return OptimisationRecord.from_document(event), str(event["when"])
    except KeyError as error:
        raise RunError(f"{where} is damaged: an optimisation's record without {error}") from error
