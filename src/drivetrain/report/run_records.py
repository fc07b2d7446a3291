"""What a report reads of a run: every piece that is there, and in words which piece is not, and why.

A run that is running, lost, diverged, half copied, or partly written by another version still has a report. Only
``run.json`` must be readable (:func:`drivetrain.archive.reader.open_run`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.archive.account_file import newest_account
from drivetrain.archive.dimensions import RunFigures, figures_of, figures_of_summary
from drivetrain.archive.listing import list_runs
from drivetrain.archive.optimisations import records_of
from drivetrain.archive.reader import Run, Segment, open_run
from drivetrain.archive.tunes import TUNE_FILE, Tune, open_tune
from drivetrain.diagnose.picture import Picture
from drivetrain.errors import DrivetrainError
from drivetrain.measure.optimisation import OptimisationRecord

__all__ = ["RunRecords", "read_records"]

Made = TypeVar("Made")
_UNREADABLE = (DrivetrainError, OSError, KeyError, TypeError, ValueError)
"""What reading a damaged or foreign file raises."""


@dataclass(frozen=True)
class RunRecords:
    """The records of one run, as they were when they were read.

    Attributes:
        status: derived status; ``diverged`` where a run failed because a figure was not finite; ``unknown`` where
            its events cannot be read.
        reason: what its end says; empty without one.
        figures: the five dimensions; None where neither summary nor steps can be read.
        summary: ``summary.json``; None where there is none of the last segment.
        lines: the logged steps.
        account: the newest profiled window ``{first, last, name_table, account}``; None where there is none.
        parent: the parent run, where the manifest names one and it lies beside this one.
        parent_note: why there is no parent; empty where there is one.
        tune: the ladder it belongs to.
        faults: pieces that are there and cannot be read.
        picture: the diagnosis of its newest profiled window; None where there is none.
        picture_note: why there is none; empty where there is one, or nobody looked.
    """

    run: Run
    status: str
    reason: str
    figures: RunFigures | None
    summary: Mapping[str, Any] | None
    lines: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    segments: Sequence[Segment]
    configuration: Mapping[str, Any]
    optimisations: Sequence[OptimisationRecord]
    account: Mapping[str, Any] | None
    parent: "RunRecords | None"
    parent_note: str
    tune: Tune | None
    faults: Sequence[str]
    picture: Picture | None = None
    picture_note: str = ""

    @property
    def manifest(self) -> Mapping[str, Any]:
        """``run.json``."""
        return self.run.manifest

    @property
    def last_step(self) -> int | None:
        """The newest logged step; None before the first."""
        return int(self.lines[-1]["step"]) if self.lines else None

    @property
    def train_iters(self) -> int | None:
        """Steps that were asked for."""
        steps = self.group("training").get("train_iters")
        return steps if isinstance(steps, int) else None

    def group(self, section: str) -> Mapping[str, Any]:
        """A section of the configuration; empty where it is not there."""
        found = self.configuration.get(section)
        return found if isinstance(found, dict) else {}

    def evaluations(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Step and event of each evaluation of the path that was trained last: a resumed run repeats some."""
        found = {
            event["step"]: event
            for event in self.events
            if event["kind"] == "evaluation" and isinstance(event.get("step"), int)
        }
        return sorted(found.items())

    def not_finite(self, key: str) -> list[tuple[int, float]]:
        """Steps at which a metric is NaN or infinite, with the value."""
        return [
            (line["step"], line[key])
            for line in self.lines
            if isinstance(line.get(key), float) and not math.isfinite(line[key])
        ]


class _WithoutSummary(Run):
    """The run as it reads where its summary cannot be used."""

    def summary(self) -> None:
        return None


def read_records(run: Run, *, with_parent: bool = True) -> RunRecords:
    """Read everything of ``run``; what cannot be read becomes a fault and not an error."""
    faults: list[str] = []

    def attempt(read: Callable[[], Made], otherwise: Made, what: str) -> Made:
        try:
            return read()
        except _UNREADABLE as error:
            words = str(error) if isinstance(error, DrivetrainError | OSError) else repr(error)
            if not any(words in fault for fault in faults):
                faults.append(f"{what}: {words}")
            return otherwise

    summary = attempt(run.summary, None, "the summary")
    status = attempt(run.status, "unknown", "the status")
    end = attempt(run.end, None, "the end") or {}
    lines: list[dict[str, Any]] = attempt(run.metrics, [], "the logged steps")
    figures = None
    if summary is not None:
        figures = attempt(lambda: figures_of_summary(summary), None, "the summary")
    if figures is None:
        without = _WithoutSummary(run.path, run.manifest)
        figures = attempt(lambda: figures_of(without), None, "the five dimensions")
    parent, parent_note = _parent(run) if with_parent else (None, "")
    return RunRecords(
        run=run,
        status=_word(status, summary or {}, end),
        reason=str(end.get("reason") or ""),
        figures=figures,
        summary=summary,
        lines=lines,
        events=attempt(run.events, [], "the events"),
        segments=attempt(run.segments, [], "the segments"),
        configuration=attempt(run.raw_config, {}, "the configuration"),
        optimisations=attempt(lambda: records_of(run), (), "the optimisation records"),
        account=attempt(lambda: newest_account(run.path), None, "the account"),
        parent=parent,
        parent_note=parent_note,
        tune=attempt(lambda: _tune(run), None, "the ladder"),
        faults=tuple(faults),
    )


def _word(status: str, summary: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    diverged = summary.get("status") == "diverged" or str(end.get("reason") or "").endswith("is not finite")
    return "diverged" if status == "failed" and diverged else status


def _parent(run: Run) -> tuple[RunRecords | None, str]:
    identity = run.manifest.get("parent")
    if identity is None:
        return None, "no parent run is recorded"
    folder = run.path.resolve().parent
    beside = folder / Path(str(identity)).name
    try:
        if (beside / "run.json").is_file():
            return read_records(open_run(beside), with_parent=False), ""
        for candidate in list_runs(folder, on_fault=lambda _: None):
            if candidate.id == identity:
                return read_records(candidate, with_parent=False), ""
    except _UNREADABLE as error:
        return None, f"the parent run {identity} cannot be read: {error}"
    return None, f"the parent run {identity} is not in {folder}"


def _tune(run: Run) -> Tune | None:
    folder = run.path.resolve().parent.parent
    return open_tune(folder) if (folder / TUNE_FILE).is_file() else None
