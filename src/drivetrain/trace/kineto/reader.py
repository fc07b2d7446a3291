"""Read one Kineto file: text → pieces → columns → rules → trace, with the cache around it."""

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from drivetrain.errors import DataError
from drivetrain.trace.health import Finding
from drivetrain.trace.kineto import cache as store
from drivetrain.trace.kineto.arguments import Arguments
from drivetrain.trace.kineto.columns import ColumnBuilder
from drivetrain.trace.kineto.damage import mend_streams, mend_times, observe, sorted_columns
from drivetrain.trace.kineto.metadata import base_of, metadata_of, rank_of, world_size_of
from drivetrain.trace.kineto.rules import finding, findings
from drivetrain.trace.kineto.source import Source
from drivetrain.trace.kineto.stream import EventStream
from drivetrain.trace.table import COLUMN_DTYPES, TEXT_TABLES, EventTable, Trace

__all__ = ["KinetoReader"]

_PIECE_COLUMNS: Final = ("first", "offset", "length")
_ASCEND: Final = "Ascend Hardware"
_JOB_FINDING: Final = "missing_distributed_info"


@contextlib.contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    """Millions of young records, none in a cycle: each collection would walk them for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class KinetoReader:
    """Reader of PyTorch's Chrome JSON."""

    format = "kineto"
    description = "Chrome JSON of the PyTorch profiler, .json or .json.gz"

    def recognises(self, head: bytes) -> bool:
        """JSON text that begins with a document or a list of objects; the reading finds out the rest."""
        text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
        return text[:1] in (b"{", b"[") or b'"traceEvents"' in head or b'"ph"' in head

    def read(self, path: Path, *, progress: Callable[[int, int], None] | None, cache: bool) -> Trace:
        """See :func:`drivetrain.trace.read.read_trace`."""
        if not cache:
            return _read(path, progress)[0]
        try:
            key = store.key_of(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        known = store.load(path, key)
        if known is not None:
            return _restored(path, *known)
        trace, pieces = _read(path, progress)
        store.store(path, key, _arrays(trace.events, pieces), _document(trace))
        return trace


def _read(
    path: Path, progress: Callable[[int, int], None] | None
) -> tuple[Trace, dict[str, NDArray[np.int64]]]:
    found: Counter[str] = Counter()
    source = Source(path, progress)
    with contextlib.closing(source.blocks()) as blocks, _garbage_collector_paused():
        stream = EventStream(blocks, found)
        builder = ColumnBuilder(found)
        places = []
        for piece in stream:
            builder.add(piece.records, piece.first, piece.document)
            places.append((piece.first, piece.offset, piece.length))
    metadata, bases = _metadata(stream, found)
    _refuse_nothing(path, stream, builder, source)
    columns, texts, at_zero = builder.finish(bases)
    del builder
    mend_times(columns, at_zero, found)
    sorted_columns(columns)
    details = {}
    clipped_ns = mend_streams(columns, found)
    if clipped_ns:
        details["clipped_duration"] = f" ({clipped_ns:,} ns were cut off)"
    table = EventTable.of(columns, texts)
    observe(table, found)
    health = findings(found, details)
    partial = _broken(stream, source)
    rank = rank_of(metadata, path)
    trace = Trace(
        path=path,
        format=KinetoReader.format,
        rank=rank,
        world_size=world_size_of(metadata),
        events=table,
        metadata=metadata,
        health=(*_end_findings(stream, source), *health, *_job_findings(metadata, rank)),
        partial=partial,
        argument_reader=Arguments(path, *np.array(places, dtype=np.int64).reshape(-1, 3).T),
    )
    return trace, dict(zip(_PIECE_COLUMNS, np.array(places, dtype=np.int64).reshape(-1, 3).T, strict=True))


def _metadata(stream: EventStream, found: Counter[str]) -> tuple[dict[str, Any], list[int]]:
    """Metadata of all documents, the first one's first, and the base time of each."""
    each = [metadata_of(document, found) for document in stream.documents]
    merged: dict[str, Any] = {}
    for metadata in reversed(each):
        merged |= metadata
    return merged, [base_of(metadata) for metadata in each]


def _refuse_nothing(path: Path, stream: EventStream, builder: ColumnBuilder, source: Source) -> None:
    """Raise for a file without anything to account for."""
    broken = f"; {source.break_reason}" if source.break_reason else ""
    if stream.length == 0:
        raise DataError(f"{path}: empty: there is nothing to read{broken}")
    if stream.arrays == 0:
        raise DataError(
            f'{path}: not a trace: JSON without "traceEvents"{broken}; known formats: '
            f"{KinetoReader.format} ({KinetoReader.description})"
        )
    if _ASCEND in builder.process_names:
        raise DataError(
            f"{path}: a profile of an Ascend device (it has a process {_ASCEND!r}), which is not read yet; known "
            f"formats: {KinetoReader.format} ({KinetoReader.description})"
        )
    if stream.records == 0:
        raise DataError(f"{path}: empty: its list of events has none that can be read{broken}")
    if not builder.length:
        raise DataError(
            f"{path}: metadata only: {stream.records:,} records, none with a duration{broken}; the profiler wrote no "
            "events (did the profiled window see a step?)"
        )


def _broken(stream: EventStream, source: Source) -> bool:
    return source.break_reason is not None or stream.open_at is not None


def _end_findings(stream: EventStream, source: Source) -> list[Finding]:
    ends = []
    if source.break_reason is not None:
        place = f" after {stream.length:,} uncompressed bytes: {source.break_reason}"
        ends.append(finding("truncated", stream.records, place))
    elif stream.open_at is not None:
        place = f" at byte {stream.open_at:,} of {stream.length:,}"
        ends.append(finding("truncated", stream.records, place))
    elif not stream.complete:
        ends.append(finding("missing_bracket", stream.records))
    if source.trailing_bytes:
        ends.append(finding("trailing_bytes", 1))
    return ends


def _job_findings(metadata: dict[str, Any], rank: int | None) -> list[Finding]:
    information = metadata.get("distributedInfo")
    if isinstance(information, dict) and "rank" in information:
        return []
    source = "; it is taken from the file's name" if rank is not None else ", nor does its name: rank unknown"
    return [finding(_JOB_FINDING, 1, source)]


def _arrays(table: EventTable, pieces: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
    columns = {column: getattr(table, column) for column in COLUMN_DTYPES}
    return {**columns, **{f"piece_{name}": array for name, array in pieces.items()}}


def _document(trace: Trace) -> dict[str, Any]:
    return {
        "format": trace.format,
        "world_size": trace.world_size,
        "metadata": trace.metadata,
        "partial": trace.partial,
        "health": store.findings_to_json(one for one in trace.health if one.id != _JOB_FINDING),
        "texts": {table: getattr(trace.events, table) for table in TEXT_TABLES},
    }


def _restored(path: Path, arrays: dict[str, NDArray[Any]], document: dict[str, Any]) -> Trace:
    columns = {column: arrays[column] for column in COLUMN_DTYPES}
    texts = {table: tuple(document["texts"][table]) for table in TEXT_TABLES}
    metadata = document["metadata"]
    # The name of a file, which may tell the rank, is no part of its content.
    rank = rank_of(metadata, path)
    return Trace(
        path=path,
        format=document["format"],
        rank=rank,
        world_size=document["world_size"],
        events=EventTable.of(columns, texts),
        metadata=metadata,
        health=(*store.findings_from_json(document["health"]), *_job_findings(metadata, rank)),
        partial=document["partial"],
        argument_reader=Arguments(path, *(arrays[f"piece_{name}"] for name in _PIECE_COLUMNS)),
    )
