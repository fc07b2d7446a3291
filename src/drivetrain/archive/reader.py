"""Reading a run directory, also while it is written, after it was moved, or when its writer was killed."""

import dataclasses
import math
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.archive.encoding import SCHEMA, read_document, restore_non_finite
from drivetrain.archive.heartbeat import FRESH_SECONDS, is_alive
from drivetrain.archive.lines import read_first, read_lines, read_tail
from drivetrain.errors import RunError

if TYPE_CHECKING:
    from drivetrain.config import RunConfig

__all__ = ["Run", "Segment", "open_run", "segment_indices"]


_BEAT_KEYS = {"schema", "step", "phase", "time", "pid", "host", "process_start", "process_place"}


def _is_event(event: Mapping[str, Any]) -> bool:
    kind = event.get("kind")
    return (
        isinstance(kind, str)
        and isinstance(event.get("time"), int | float)
        and "segment" in event
        and (kind != "tag" or {"tag", "action"} <= event.keys())
        and (kind != "end" or {"status", "reason"} <= event.keys())
    )


def _check_schema(document: Mapping[str, Any], path: Path) -> None:
    schema = document.get("schema")
    if not isinstance(schema, int) or schema < 1:
        raise RunError(f"{path} is damaged: it has no schema number (found {schema!r}, {SCHEMA} is expected)")
    if schema > SCHEMA:
        raise RunError(
            f"{path} has schema {schema}, this version of drivetrain reads up to {SCHEMA}: "
            f"it was written by a newer one, upgrade drivetrain to read it"
        )


@dataclasses.dataclass(frozen=True)
class Segment:
    """One (re)start of a run: from ``start_step`` on it shadows the segments before it.

    ``start_step`` is None while the writer has not come as far as the header (or died before it); ``time``,
    its beginning in seconds since 1970, is infinite then: whatever happened so far happened before.
    """

    index: int
    path: Path
    start_step: int | None
    time: float


@dataclasses.dataclass(frozen=True)
class Run:
    """One run directory, opened for reading. Each method reads the files as they are at that moment.

    Attributes:
        path: the directory, wherever it is now.
        manifest: ``run.json``.
    """

    path: Path
    manifest: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The name the directory was made under; unique."""
        return str(self.manifest["id"])

    @property
    def name(self) -> str:
        """What the user called it; several runs may share it."""
        return str(self.manifest["name"])

    def config(self) -> "RunConfig":
        """The resolved configuration.

        Raises:
            RunError: ``config.toml`` is missing.
            ConfigurationError: this version of drivetrain does not accept it.
        """
        from drivetrain.config import load_config  # pydantic's price is paid by those who need the schema

        self._config_path()
        return load_config(str(self.path / "config.toml")).config

    def raw_config(self) -> dict[str, Any]:
        """``config.toml`` as plain tables: cheap, and readable whatever version of the schema wrote it."""
        path = self._config_path()
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise RunError(f"{path} is damaged: {error}") from error

    def segments(self) -> list[Segment]:
        """All segments, oldest first."""
        found = []
        for index in segment_indices(self.path):
            path = self.path / "segments" / f"{index:04d}"
            header = read_first(path / "metrics.jsonl")
            if header is None:
                found.append(Segment(index, path, None, math.inf))
            else:
                _check_header(header, path / "metrics.jsonl")
                found.append(Segment(index, path, int(header["start_step"]), float(header["time"])))
        return found

    def last_segment(self) -> int | None:
        """Index of the newest segment; None before the first."""
        return max(segment_indices(self.path), default=None)

    def metrics(self) -> list[dict[str, Any]]:
        """One dict per logged step, ``{"step", "time", <metric keys>, "tags"}``, steps increasing.

        Steps that a later segment repeats come from that one; from its start step on, nothing of an earlier
        segment is left. NaN and infinities are floats.

        Raises:
            RunError: a line that is not the last of its file is damaged.
        """
        return self._unshadowed("metrics.jsonl")

    def ranks(self) -> dict[int, list[dict[str, Any]]]:
        """Per rank what :meth:`metrics` gives for the run, of the ranks that logged their own times."""
        names = {path.name for path in self.path.glob("segments/*/ranks/r*.jsonl")}
        return {int(name[1:-6]): self._unshadowed(f"ranks/{name}") for name in sorted(names)}

    def recent_metrics(self) -> list[dict[str, Any]]:
        """The newest lines of the last segment that has any: some dozens, whatever the length of the run."""
        for index in reversed(segment_indices(self.path)):
            lines = read_tail(self.path / "segments" / f"{index:04d}" / "metrics.jsonl")
            if steps := [line for line in lines if "step" in line]:
                return steps
        return []

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first: ``{"schema", "time", "segment", "kind", ...}``.

        ``segment`` is None for what happened outside a segment (a tag set from the command line).
        """
        path = self.path / "events.jsonl"
        events = read_lines(path)
        for number, event in enumerate(events, start=1):
            if not _is_event(event):
                raise RunError(
                    f"{path} is damaged at line {number}: no event (kind, time and segment are expected)"
                )
        return events

    def tags(self) -> list[str]:
        """The user's tags, in the order they were set."""
        tags: dict[str, None] = {}
        for event in self.events():
            if event["kind"] == "tag":
                tags.pop(event["tag"], None)
                if event["action"] == "add":
                    tags[event["tag"]] = None
        return list(tags)

    def data_fingerprint(self) -> str:
        """Fingerprint of the corpus that the run goes on with: the one it was started with, or the last that was
        accepted in its place (``drivetrain data accept``)."""
        accepted = [event["fingerprint"] for event in self.events() if event["kind"] == "data_accepted"]
        return str(accepted[-1] if accepted else self.manifest["dataset"]["fingerprint"])

    def end(self) -> dict[str, Any] | None:
        """The ``end`` event of the last segment; None while there is none.

        A restart that fails before it opens a segment of its own ends the run as well.
        """
        segments = self.segments()
        last = segments[-1] if segments else None
        ends = [
            event
            for event in self.events()
            if event["kind"] == "end"
            and (
                (last is not None and event["segment"] == last.index)
                or (event["segment"] is None and (last is None or event["time"] >= last.time))
            )
        ]
        return ends[-1] if ends else None

    def heartbeat(self) -> dict[str, Any] | None:
        """The last sign of life, ``{"step", "phase", "time", "pid", "host", ...}``; None before the first.

        A damaged one is none: it is written without fsync, so that a power cut may leave an empty file, and
        the run must be read and continued all the same.
        """
        path = self.path / "heartbeat.json"
        try:
            beat = read_document(path)
        except (FileNotFoundError, RunError):
            return None
        if not beat.keys() >= _BEAT_KEYS or not isinstance(beat["time"], int | float):
            return None
        _check_schema(beat, path)
        return beat

    def status(self) -> str:
        """``finished``, ``failed``, ``interrupted`` or ``killed`` as the end event of the last segment says;

        without one ``running`` while the process lives (where that cannot be seen: while the heartbeat is
        younger than 30 s), else ``lost``.
        """
        end = self.end()
        if end is not None:
            return str(end["status"])
        beat = self.heartbeat()
        if beat is None:
            return "lost"
        alive = is_alive(beat)
        if alive is None:
            alive = time.time() - float(beat["time"]) < FRESH_SECONDS
        return "running" if alive else "lost"

    def summary(self) -> dict[str, Any] | None:
        """``summary.json``; None when there is none, or only that of a segment before the last one."""
        path = self.path / "summary.json"
        try:
            document = read_document(path)
        except FileNotFoundError:
            return None
        _check_schema(document, path)
        if document.get("segment") != self.last_segment():
            return None
        return {key: restore_non_finite(value) for key, value in document.items()}

    def _config_path(self) -> Path:
        path = self.path / "config.toml"
        if not path.is_file():
            raise RunError(
                f"{self.path} has no config.toml; the run directory is incomplete, copy it again whole"
            )
        return path

    def _unshadowed(self, name: str) -> list[dict[str, Any]]:
        kept: list[dict[str, Any]] = []
        for index in segment_indices(self.path):
            path = self.path / "segments" / f"{index:04d}" / name
            lines = read_lines(path)
            if not lines:
                continue
            header = lines[0]
            _check_header(header, path)
            while kept and kept[-1]["step"] >= header["start_step"]:
                kept.pop()
            kept.extend(lines[1:])
        return kept


def segment_indices(run_path: Path) -> list[int]:
    """Numbers of the segments of the run at ``run_path``, ascending."""
    folder = run_path / "segments"
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal() and entry.is_dir())


def _check_header(header: Mapping[str, Any], path: Path) -> None:
    known = isinstance(header.get("start_step"), int) and isinstance(header.get("time"), int | float)
    if "kind" not in header or not known:
        raise RunError(f"{path} is damaged at line 1: the segment's header is expected")
    _check_schema(header, path)


def _suggestion(path: Path) -> str:
    """Where the nearest run is: above ``path``, in it, or beside it."""
    for parent in path.resolve().parents:
        if (parent / "run.json").is_file():
            return f"the run is {parent}"
    for folder in (path, path.parent):
        runs = sorted(entry.parent for entry in folder.glob("*/run.json"))
        if runs:
            from drivetrain.config import nearest

            close = nearest(path.name, [run.name for run in runs])
            best = folder / close if close is not None else runs[-1]
            return f"the {'nearest' if close is not None else 'latest'} run in {folder} is {best}"
    return "`drivetrain runs list` shows the runs there are"


def open_run(path: Path | str) -> Run:
    """Open the run directory at ``path``.

    Raises:
        RunError: it is none (says what is missing and where the nearest run is), it is damaged, or a newer
            version of drivetrain wrote it.
    """
    folder = Path(path)
    file = folder / "run.json"
    if not folder.exists():
        raise RunError(f"{folder} does not exist; {_suggestion(folder)}")
    if not folder.is_dir():
        raise RunError(f"{folder} is a file, a run is a folder; {_suggestion(folder)}")
    try:
        manifest = read_document(file)
    except FileNotFoundError:
        raise RunError(f"{folder} is no run directory: run.json is missing; {_suggestion(folder)}") from None
    _check_schema(manifest, file)
    for key in ("id", "name", "created"):
        if not isinstance(manifest.get(key), str):
            raise RunError(f"{file} is damaged: {key!r} is missing")
    for key in ("provenance", "devices", "dataset", "layout"):
        if not isinstance(manifest.get(key), dict):
            raise RunError(f"{file} is damaged: the group {key!r} is missing")
    return Run(folder, manifest)
