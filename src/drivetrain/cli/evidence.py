"""What a profiled window proves of a run's optimisations, added to its record when the run has ended."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.archive.profile_windows import newest_window
from drivetrain.archive.reader import Run, open_run
from drivetrain.archive.writer import append_event
from drivetrain.errors import DrivetrainError
from drivetrain.measure.optimisation import Observation, OptimisationRecord

__all__ = ["with_evidence"]


def with_evidence(path: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """``summary`` of the run in ``path``, with the evidence of its window; as it is where no window was profiled.

    What the window shows is written to the run's events and its ``summary.json`` as well, and said on stderr. A trace
    that cannot be read, and a disk that is full, leave evidence unknown, with a warning: the training itself went well.
    """
    run = open_run(path)
    window = _window_of(run)
    if window is None:
        return summary
    from drivetrain.archive.optimisations import add_evidence, records_of

    try:
        seen = _observation(run, window)
        overlap = _overlap_in_words(summary)
        records = [_proved(record, run, seen, overlap) for record in records_of(run)]
        findings = [text for record in records if (text := _finding(record)) is not None]
        changed = add_evidence(run, records, findings)
    except DrivetrainError as error:
        _warn(path, f"no evidence of optimisations: {error}")
        return summary
    _say(records, findings)
    return {**summary, **changed}


def _warn(path: Path, message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
    try:
        append_event(path, "warning", message=message)
    except DrivetrainError as error:
        print(f"warning: the run's events do not say so: {error}", file=sys.stderr)


def _window_of(run: Run) -> Mapping[str, Any] | None:
    """The newest profile window, if it is of the run's last segment: its records are what is to be proved."""
    window = newest_window(run)
    return window if window is not None and window["segment"] == run.last_segment() else None


def _observation(run: Run, window: Mapping[str, Any]) -> Observation:
    """What the first of the window's ranks recorded, rank 0 where it was profiled."""
    from drivetrain.trace.classify import classify
    from drivetrain.trace.observe import observe
    from drivetrain.trace.read import read_trace

    name = min(window["file_bytes"], key=lambda file: (len(file), file))
    # No columns are kept beside the trace: nobody has asked for more than the training yet.
    trace = read_trace(run.path / window["path"] / name, cache=False)
    return observe(trace, classify(trace, None))


def _proved(record: OptimisationRecord, run: Run, seen: Observation, overlap: str) -> OptimisationRecord:
    from drivetrain.catalogue import entry

    about = entry(record.name)
    evidence = about.evidence(run.config(), seen, None)
    if evidence.kind == "shown" and any(name.split(".")[0] == "communication" for name in about.treats):
        evidence = dataclasses.replace(evidence, why=evidence.why + overlap)
    return dataclasses.replace(record, evidence=evidence)


def _overlap_in_words(summary: Mapping[str, Any]) -> str:
    """What the run itself saw of its collectives; empty where it does not know."""
    seen = summary.get("communication") or {}
    if seen.get("overlap_frac") is None:
        return ""
    return (
        f"; in {seen['steps']} steps without the profiler {seen['overlap_frac']:.0%} of communication was hidden, "
        f"and {seen['exposed_frac']:.1%} of a step spent waiting for it"
    )


def _finding(record: OptimisationRecord) -> str | None:
    """Where the window contradicts the record."""
    evidence = record.evidence
    if evidence is None:
        return None
    if record.active and evidence.kind == "absent":
        value = str(record.value).lower() if isinstance(record.value, bool) else record.value
        return f"{record.field} = {value} shows no effect in the profiled steps: {evidence.why}"
    if not record.active and evidence.kind == "shown":
        return (
            f"{record.name} is recorded as not in effect, and yet the profiled steps show it: {evidence.why}"
        )
    return None


def _say(records: Sequence[OptimisationRecord], findings: Sequence[str]) -> None:
    for record in records:
        if record.active and record.evidence is not None:
            print(
                f"evidence of {record.name}: {record.evidence.kind}, {record.evidence.why}", file=sys.stderr
            )
    for finding in findings:
        print(f"warning: {finding}", file=sys.stderr)
