"""Writing a run directory. The layout is described in ``docs/run-directory.md``.

Rank 0 owns the directory (:class:`RunWriter`); other ranks write nothing but their own file under
``segments/<k>/ranks/`` (:class:`RankLog`).
"""

import datetime
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from drivetrain.archive.atomic import sync_folder, write_fault, write_json, write_text
from drivetrain.archive.encoding import SCHEMA, dumps, encode_number
from drivetrain.archive.heartbeat import is_alive, write_heartbeat
from drivetrain.archive.lines import LineWriter
from drivetrain.archive.reader import open_run, segment_indices
from drivetrain.errors import RunError
from drivetrain.measure.metrics import METRICS

__all__ = ["CREATED", "END_STATUSES", "EVENT_KINDS", "RankLog", "RunWriter", "append_event"]

EVENT_KINDS = frozenset(
    {
        "start",
        "resume",
        "checkpoint",
        "evaluation",
        "warning",
        "end",
        "gradient_reduction",
        "skipped_step",
        "window",
        "tag",
        "optimisation",
        "alarm",
        "restart",
        "compilation",
        "data",
        "data_accepted",
        "tuned_file",
    }
)
"""Kinds of lines in ``events.jsonl``."""

END_STATUSES = frozenset({"finished", "failed", "interrupted", "killed"})
"""What an ``end`` event may say. ``running`` and ``lost`` are never stored: they are derived."""

CREATED = "created"
"""Phase of the heartbeat that the maker of a run writes."""

_MANIFEST_KEYS = frozenset({"config_hash", "layout", "provenance", "devices", "dataset", "seed"})

# A segment's lines and a run's events that must survive a power cut, not only a killed process.
_SYNCED_KINDS = frozenset({"end", "checkpoint"})


def _metric_line(
    step: int, values: Mapping[str, float | int | None], tags: Iterable[str] | None
) -> dict[str, Any]:
    line: dict[str, Any] = {"step": step, "time": time.time()}
    for key, value in values.items():
        # The common case without a call: this runs at every step.
        line[key] = value if type(value) is float and math.isfinite(value) else encode_number(value)
    if tags is not None:
        line["tags"] = list(tags)
    return line


def _header(kind: str, segment: int, start_step: int, **more: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": kind,
        "segment": segment,
        "start_step": start_step,
        "time": time.time(),
        **more,
    }


def _event_line(segment: int | None, kind: str, fields: Mapping[str, Any]) -> bytes:
    assert kind in EVENT_KINDS, (
        f"{kind!r} is no kind of event; add it to EVENT_KINDS and to the documentation"
    )
    assert not fields.keys() & {"schema", "time", "segment", "kind"}, (
        f"an event's own fields: {sorted(fields)}"
    )
    return dumps({"schema": SCHEMA, "time": time.time(), "segment": segment, "kind": kind, **fields})


def append_event(path: Path | str, kind: str, **fields: Any) -> None:
    """Append one event to a run of another process, running or not (a tag). Nothing is rewritten.

    Raises:
        RunError: ``path`` is no run directory.
        EnvironmentFault: the file cannot be written.
    """
    run = open_run(path)
    events = LineWriter(run.path / "events.jsonl")
    try:
        events.write_bytes(_event_line(None, kind, fields))
        events.sync()
    finally:
        events.close()


class RankLog:
    """One rank's own times, ``segments/<k>/ranks/r<rank>.jsonl``. Each rank has one and writes only to it."""

    def __init__(
        self,
        run_path: Path | str,
        *,
        segment: int,
        rank: int,
        start_step: int,
        on_fault: Callable[[str], None] | None = None,
    ) -> None:
        """Open the file; rank 0 made the segment's folder. ``on_fault`` as for ``LineWriter``."""
        folder = Path(run_path) / "segments" / f"{segment:04d}" / "ranks"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise write_fault(folder, error, "the folder could not be made") from error
        self._lines = LineWriter(folder / f"r{rank:05d}.jsonl")
        self._lines.write(_header("rank", segment, start_step, rank=rank))
        self._lines.on_fault = on_fault

    def log(
        self,
        step: int,
        values: Mapping[str, float | int | None],
        *,
        collectives: Mapping[str, Any] | None = None,
    ) -> None:
        """Append this rank's values of one step; keys as in :data:`drivetrain.measure.metrics.METRICS`.

        Args:
            collectives: times of each of the step's, for :mod:`drivetrain.measure.overlap` to match between ranks.
        """
        assert values.keys() <= METRICS.keys(), f"not in METRICS: {sorted(values.keys() - METRICS.keys())}"
        line = _metric_line(step, values, None)
        if collectives is not None:
            line["collectives"] = collectives
        self._lines.write(line)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class RunWriter:
    """Writes one run directory: the manifest once, then segments of metrics, events and at last a summary.

    Attributes:
        path: the run directory.
        segment: index of the open segment; None before :meth:`open_segment`.
    """

    def __init__(self, path: Path, *, on_fault: Callable[[str], None] | None = None) -> None:
        """Not called directly: use :meth:`create` or :meth:`resume`."""
        self.path = path
        self.segment: int | None = None
        self._on_fault = on_fault
        self._events = LineWriter(path / "events.jsonl", on_fault=on_fault)
        self._metrics: LineWriter | None = None
        self._lock: int | None = None

    @classmethod
    def create(
        cls,
        runs_dir: Path | str,
        name: str,
        *,
        config_toml: str,
        manifest: Mapping[str, Any],
        on_fault: Callable[[str], None] | None = None,
    ) -> Self:
        """Make ``<runs_dir>/<date>-<time>-<name>-<4 hex>/`` with ``run.json`` and ``config.toml``.

        Args:
            runs_dir: the archive; made when missing.
            name: characters other than letters, digits, ``.``, ``_`` and ``-`` become ``-``.
            config_toml: the resolved configuration.
            manifest: ``config_hash, layout, provenance, devices, dataset, seed`` and what a
                ``RunOrigin`` gives. ``schema``, ``id``, ``created`` and ``name`` are added here.
            on_fault: told once a file when a line of metrics or an event cannot be written; the run goes on
                without those lines. None: :class:`EnvironmentFault` is raised.

        Raises:
            EnvironmentFault: the directory cannot be made or filled; nothing is left of it.
        """
        missing = _MANIFEST_KEYS - manifest.keys()
        assert not missing, f"the manifest lacks {sorted(missing)}"
        word = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "run"
        now = datetime.datetime.now().astimezone()
        path = _make_directory(Path(runs_dir), f"{now:%Y%m%d-%H%M%S}-{word}")
        document = {
            "schema": SCHEMA,
            "id": path.name,
            "created": now.astimezone(datetime.UTC).isoformat(timespec="milliseconds"),
            "name": word,
        }
        document |= {"parent": None, "change": None}
        document |= {
            key: value for key, value in manifest.items() if key not in ("schema", "id", "created", "name")
        }
        try:
            (path / "segments").mkdir()
            write_text(path / "config.toml", config_toml)
            # Last: a folder is a run from the moment it has a run.json.
            write_json(path / "run.json", document)
            sync_folder(path.parent)
            # Alive, not lost, while the creator prepares the processes that will train.
            write_heartbeat(path, 0, CREATED)
            return cls(path, on_fault=on_fault)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    @classmethod
    def resume(cls, path: Path | str, *, on_fault: Callable[[str], None] | None = None) -> Self:
        """Open an existing run to add a segment.

        Raises:
            RunError: it is no run directory, or another process of this machine is still writing to it.
        """
        run = open_run(path)
        beat = run.heartbeat()
        if beat is not None and _is_training(beat) and (run.end() or {"time": 0.0})["time"] < beat["time"]:
            raise RunError(
                f"{run.path} is still running (process {beat['pid']}, step {beat['step']}); two processes "
                f"cannot continue one run: wait for it, or stop it with `kill {beat['pid']}`"
            )
        # Two processes that start at the same moment both find no heartbeat; the lock lets only one of them in.
        lock = _lock(run.path)
        try:
            writer = cls(run.path, on_fault=on_fault)
        except BaseException:
            _unlock(lock)
            raise
        writer._lock = lock
        return writer

    def open_segment(self, start_step: int) -> int:
        """Begin the next segment and return its index.

        Args:
            start_step: number of the first step that will be logged in it. Steps from this one on in earlier
                segments are shadowed: a run resumed after step 50 opens its segment at 51.
        """
        self._close_segment()
        folder, index = self._make_segment()
        self._metrics = LineWriter(folder / "metrics.jsonl")
        # A segment without its header cannot be read, so this line may not get lost.
        self._metrics.write(_header("metrics", index, start_step))
        self._metrics.on_fault = self._on_fault
        self.segment = index
        return index

    def log_metrics(
        self, step: int, values: Mapping[str, float | int | None], tags: Iterable[str] = ()
    ) -> None:
        """Append the metrics of one step to the open segment.

        Args:
            step: its number, increasing within a segment.
            values: keys of :data:`drivetrain.measure.metrics.METRICS` in their units. None: unknown; NaN and
                infinities are kept.
            tags: what sets the step apart (``compile``, ``checkpoint``, ``evaluation`` ...).
        """
        assert self._metrics is not None, "open_segment() comes first"
        assert values.keys() <= METRICS.keys(), f"not in METRICS: {sorted(values.keys() - METRICS.keys())}"
        self._metrics.write(_metric_line(step, values, tags))

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event (one of :data:`EVENT_KINDS`) with its own fields.

        An ``end`` says ``status=`` (one of :data:`END_STATUSES`) and ``reason=``; it and ``checkpoint`` are
        fsynced.
        """
        if kind == "end":
            assert fields.get("status") in END_STATUSES, f"status={fields.get('status')!r}"
            assert "reason" in fields, "an end has a reason, None when it is simply finished"
        self._events.write_bytes(_event_line(self.segment, kind, fields))
        if kind in _SYNCED_KINDS:
            self._events.sync()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace ``summary.json``. ``schema`` and the segment it describes are added."""
        write_json(self.path / "summary.json", {"schema": SCHEMA, **summary, "segment": self.segment})

    def close(self) -> None:
        """Close the files. Says nothing about the run: that is the ``end`` event."""
        self._close_segment()
        self._events.close()
        _unlock(self._lock)
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _close_segment(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def _make_segment(self) -> tuple[Path, int]:
        folder = self.path / "segments"
        # mkdir is exclusive: two processes never write to one segment.
        for _ in range(100):
            index = max(segment_indices(self.path), default=-1) + 1
            try:
                (folder / f"{index:04d}").mkdir()
                return folder / f"{index:04d}", index
            except FileExistsError:
                continue
            except OSError as error:
                raise write_fault(
                    folder / f"{index:04d}", error, "the segment could not be opened"
                ) from error
        raise RunError(f"another process keeps opening segments in {folder}; stop it first")


def _is_training(beat: Mapping[str, Any]) -> bool:
    """Whether another process of this machine is known to be at work on the run.

    The creator of a run only waits for the one that trains.
    """
    return beat["pid"] != os.getpid() and beat["phase"] != CREATED and bool(is_alive(beat))


def _lock(run_path: Path) -> int | None:
    """Descriptor that holds the run's exclusive lock until it is closed; None where there are no locks.

    Raises:
        RunError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:
        return None
    # run.json is there in every run and is never replaced; opened for reading, so that nothing changes.
    descriptor = os.open(run_path / "run.json", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunError(
            f"another process is just continuing {run_path}; two processes cannot continue one run: wait for it"
        ) from None
    except OSError:
        # Some network file systems have no locks; there the heartbeat alone has to do.
        os.close(descriptor)
        return None
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _make_directory(runs_dir: Path, prefix: str) -> Path:
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        for _ in range(100):
            path = runs_dir / f"{prefix}-{secrets.token_hex(2)}"
            try:
                path.mkdir()
                return path
            except FileExistsError:
                continue
    except OSError as error:
        raise write_fault(runs_dir / prefix, error, "no run was started") from error
    raise RunError(f"a hundred runs named {prefix} exist in {runs_dir}; choose another run.name")
