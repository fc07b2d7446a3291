"""The event table: what every reader produces and everything after the readers works on.

Columns are numpy arrays of equal length; texts are stored once and referred to by index. Times are integer
nanoseconds, so that sums and differences are exact.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.health import Finding

__all__ = ["COLUMN_DTYPES", "DEVICE_WORK", "TEXT_TABLES", "Category", "EventTable", "Trace"]


class Category(IntEnum):
    """What kind of record an event is; readers map each format's and generation's words onto these."""

    KERNEL = 0
    """A kernel on a device."""
    MEMCPY = 1
    """A copy done by a device's copy engine."""
    MEMSET = 2
    CPU_OP = 3
    """An operator on the host (``aten::mm``)."""
    RUNTIME = 4
    """A call into the device's runtime or driver: launches, copies, synchronisation."""
    ANNOTATION = 5
    """A user's range on the host: ``record_function``, ``ProfilerStep#n``, ``gloo:*``."""
    DEVICE_ANNOTATION = 6
    """The profiler's projection of a user's range onto a device. No work, and no source of steps."""
    PYTHON = 7
    """A Python function (``with_stack``)."""
    SYNC = 8
    """Synchronisation as the device sees it (``cuda_sync``). No work, although it carries a stream."""
    OVERHEAD = 9
    """Time the profiler itself took."""
    OTHER = 10


DEVICE_WORK: tuple[Category, ...] = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
"""The only categories that make a device busy."""

COLUMN_DTYPES: Mapping[str, type[np.generic]] = {
    "start_ns": np.int64,
    "duration_ns": np.int64,
    "category": np.uint8,
    "name": np.int32,
    "process": np.int32,
    "thread": np.int32,
    "device": np.int32,
    "stream": np.int32,
    "correlation": np.int64,
    "external_id": np.int64,
    "sequence": np.int64,
    "group": np.int32,
    "bytes": np.int64,
    "file_index": np.int64,
}
"""Columns of :class:`EventTable` and their dtypes."""

TEXT_TABLES: tuple[str, ...] = ("names", "processes", "threads", "streams", "groups")
"""Text tables of :class:`EventTable`."""


@dataclass(frozen=True, eq=False)
class EventTable:
    """Events that have a duration, sorted by (start, longest first, order in the file).

    All columns have shape (n,). Points in time, counters and flow arrows are not kept.
    """

    start_ns: NDArray[np.int64]
    """Absolute time (Unix epoch where the file says so), from the decimal digits of the file."""
    duration_ns: NDArray[np.int64]
    """Never negative."""
    category: NDArray[np.uint8]
    """A :class:`Category`."""
    name: NDArray[np.int32]
    """Index into ``names``."""
    process: NDArray[np.int32]
    """Index into ``processes``: the text of the record's ``pid`` (a device's ordinal for device records)."""
    thread: NDArray[np.int32]
    """Index into ``threads``: the text of the record's ``tid``."""
    device: NDArray[np.int32]
    """Ordinal of the device of a device record; -1 for host records and where unknown."""
    stream: NDArray[np.int32]
    """Index into ``streams``: the text of the stream (``0`` is a stream like any other); -1 without one."""
    correlation: NDArray[np.int64]
    """Joins a launch on the host with its device records (several, for a graph launch); -1: none."""
    external_id: NDArray[np.int64]
    """Joins an operator with the launches it made; -1: none."""
    sequence: NDArray[np.int64]
    """Autograd's number: of a backward node that of the forward call that made it; of any other operator the number the
    next node made on its thread would get; -1: none."""
    group: NDArray[np.int32]
    """Index into ``groups``; -1: unknown."""
    bytes: NDArray[np.int64]
    """Bytes copied, set, or put into a collective by this rank; -1: unknown."""
    file_index: NDArray[np.int64]
    """Ordinal of the record in the file, for arguments read later."""
    names: tuple[str, ...]
    processes: tuple[str, ...]
    threads: tuple[str, ...]
    streams: tuple[str, ...]
    groups: tuple[str, ...]
    """Process groups as ``name|description``, either part may be empty: ``0|default_pg``, ``3|``."""

    def __post_init__(self) -> None:
        length = len(self.start_ns)
        for column, dtype in COLUMN_DTYPES.items():
            array = getattr(self, column)
            assert array.shape == (length,), f"{column} has shape {array.shape}, not ({length},)"
            assert array.dtype == dtype, f"{column} is {array.dtype}"

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> NDArray[np.int64]:
        """Start plus duration, shape (n,)."""
        return self.start_ns + self.duration_ns

    def select(self, rows: NDArray[Any] | Sequence[int] | slice) -> Self:
        """The table of some rows: a mask of shape (n,), indices, or a slice. Text tables are shared."""
        columns = {column: getattr(self, column)[rows] for column in COLUMN_DTYPES}
        return replace(self, **columns)

    def is_device_work(self) -> NDArray[np.bool_]:
        """Mask, shape (n,), of the records that make a device busy."""
        return self.category <= np.uint8(Category.MEMSET)

    @cached_property
    def launches(self) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        """Calls into the runtime that carry a correlation: the correlations, ascending, and the rows they are of.

        Of several calls of one correlation the first in time comes first.
        """
        rows = np.flatnonzero((self.category == np.uint8(Category.RUNTIME)) & (self.correlation >= 0))
        keys = self.correlation[rows]
        if np.any(keys[1:] < keys[:-1]):
            order = np.argsort(keys, kind="stable")
            keys, rows = keys[order], rows[order]
        return keys, rows

    @classmethod
    def of(cls, columns: Mapping[str, NDArray[Any]], texts: Mapping[str, tuple[str, ...]]) -> Self:
        """The table of these columns and text tables, which are checked for their lengths and dtypes."""
        parts: dict[str, Any] = {**columns, **texts}
        return cls(**parts)

    @classmethod
    def empty(cls) -> Self:
        """A table without rows."""
        columns = {column: np.empty(0, dtype) for column, dtype in COLUMN_DTYPES.items()}
        return cls.of(columns, dict.fromkeys(TEXT_TABLES, ()))


assert {field.name for field in fields(EventTable)} == {*COLUMN_DTYPES, *TEXT_TABLES}
assert max(DEVICE_WORK) == Category.MEMSET < Category.CPU_OP


def _no_arguments(file_indices: NDArray[np.int64]) -> list[dict[str, Any]]:
    return [{} for _ in file_indices]


@dataclass(frozen=True, eq=False)
class Trace:
    """One profiler file."""

    path: Path
    format: str
    """Name of the reader: ``kineto``."""
    rank: int | None
    """From the file's own record of the job, else from its name; None: unknown."""
    world_size: int | None
    events: EventTable
    metadata: Mapping[str, Any]
    """Everything the file says beside its events: ``distributedInfo``, ``deviceProperties``, versions."""
    health: tuple[Finding, ...]
    partial: bool
    """Whether the file breaks off, so that its end is missing."""
    argument_reader: Callable[[NDArray[np.int64]], list[dict[str, Any]]] = _no_arguments
    """Reads the arguments of records, given their ``file_index``, from the file."""

    def arguments(self, rows: NDArray[Any] | Sequence[int]) -> list[dict[str, Any]]:
        """All arguments of some events (shapes, dtypes, launch dimensions, …), in the order of ``rows``.

        They are not kept in memory: the file is read again.

        Args:
            rows: row numbers of :attr:`events`, or a mask.

        Raises:
            DataError: the file has gone.
        """
        if len(rows) == 0:
            return []
        return self.argument_reader(self.events.file_index[np.asarray(rows)])
