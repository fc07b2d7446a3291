"""Event tables made in memory, without a file: for tests that need many, or odd ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.trace.health import Finding
from drivetrain.trace.table import COLUMN_DTYPES, Category, EventTable, Trace


@dataclass(frozen=True)
class Row:
    """One event; times in ns."""

    category: Category
    name: str
    start: int
    duration: int
    thread: str = "main"
    stream: int = -1
    correlation: int = -1
    group: str = ""
    bytes: int = -1
    device: int = -1
    sequence: int = -1


def kernel(name: str, start: int, duration: int, *, stream: int = 7, **more: Any) -> Row:
    return Row(Category.KERNEL, name, start, duration, thread=str(stream), stream=stream, device=0, **more)


def table_of(rows: Sequence[Row]) -> EventTable:
    order = sorted(range(len(rows)), key=lambda i: (rows[i].start, -rows[i].duration, i))
    names = sorted({row.name for row in rows})
    threads = sorted({row.thread for row in rows})
    streams = sorted({row.stream for row in rows if row.stream >= 0})
    groups = sorted({row.group for row in rows if row.group})
    columns: dict[str, list[int]] = {column: [] for column in COLUMN_DTYPES}
    for i in order:
        row = rows[i]
        values = {
            "start_ns": row.start,
            "duration_ns": row.duration,
            "category": int(row.category),
            "name": names.index(row.name),
            "process": 0,
            "thread": threads.index(row.thread),
            "device": row.device,
            "stream": streams.index(row.stream) if row.stream >= 0 else -1,
            "correlation": row.correlation,
            "external_id": -1,
            "sequence": row.sequence,
            "group": groups.index(row.group) if row.group else -1,
            "bytes": row.bytes,
            "file_index": i,
        }
        for column, value in values.items():
            columns[column].append(value)
    arrays: dict[str, Any] = {
        column: np.array(values, COLUMN_DTYPES[column]) for column, values in columns.items()
    }
    texts = {"names": tuple(names), "processes": ("0",), "threads": tuple(threads)}
    return EventTable(**arrays, **texts, streams=tuple(map(str, streams)), groups=tuple(groups))


def trace_of_rows(
    rows: Sequence[Row],
    *,
    rank: int | None = 0,
    world_size: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    health: tuple[Finding, ...] = (),
    partial: bool = False,
) -> Trace:
    path = Path(f"rank{rank}.json")
    return Trace(path, "kineto", rank, world_size, table_of(rows), metadata or {}, health, partial)
