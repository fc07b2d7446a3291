"""Rules for records that read well but cannot be true, applied to the columns; and what else is worth saying."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.kineto.columns import Columns
from drivetrain.trace.table import DEVICE_WORK, Category, EventTable

__all__ = ["FEWEST_SWALLOWED", "mend_streams", "mend_times", "observe", "sorted_columns"]

_DAY_NS: Final = 86_400 * 10**9
_FAR_FROM_ZERO_NS: Final = 600 * 10**9
FEWEST_SWALLOWED: Final = 8
"""A record that lasts over at least so many later ones of its stream did not really.

True overlap on one stream (programmatic dependent launch, ties of ROCm) reaches over one or two.
"""
_GRAPH_LAUNCH: Final = re.compile(r"^(?:cuda|hip|cu|aclrt)GraphLaunch")
_KERNEL_LAUNCH: Final = re.compile(
    r"^(?:cuda|hip|cu|hipExt)(?:ModuleLaunch|Launch)(?:Cooperative)?Kernel|GraphLaunch"
)
_STEP: Final = "ProfilerStep#"


def _keep(columns: Columns, mask: NDArray[np.bool_]) -> None:
    for column in columns:
        columns[column] = columns[column][mask]


def mend_times(columns: Columns, at_zero: NDArray[np.bool_], found: Counter[str]) -> None:
    """Drop records without a true start; make durations non-negative and finite. In place."""
    starts = columns["start_ns"]
    if len(starts) == 0:
        return
    keep = np.ones(len(starts), dtype=bool)
    others = starts[~at_zero]
    if at_zero.any() and len(others):
        # A trace may begin at 0 of its own clock; then its other records are near.
        zero = int(starts[at_zero][0])
        if int(np.min(np.abs(others - zero))) > _FAR_FROM_ZERO_NS:
            found["zero_timestamp"] += int(at_zero.sum())
            keep &= ~at_zero
    middle = int(np.partition(starts[keep], int(keep.sum()) // 2)[int(keep.sum()) // 2])
    # Differences of damaged times may overflow; comparisons with two bounds cannot.
    outlying = keep & ((starts < middle - _DAY_NS) | (starts > middle + _DAY_NS))
    if outlying.any():
        found["outlying_timestamp"] += int(outlying.sum())
        keep &= ~outlying
    if not keep.all():
        _keep(columns, keep)
    durations = columns["duration_ns"]
    for rule, wrong in (("negative_duration", durations < 0), ("overflowing_duration", durations > _DAY_NS)):
        if wrong.any():
            found[rule] += int(wrong.sum())
            durations[wrong] = 0


def sorted_columns(columns: Columns) -> None:
    """Sort by (start, longest first, order in the file). In place, one column at a time."""
    starts, durations = columns["start_ns"], columns["duration_ns"]
    if len(starts) == 0:
        return
    order = np.argsort(starts, kind="stable")
    ordered = starts[order]
    tied = np.zeros(len(order), dtype=bool)
    same = ordered[1:] == ordered[:-1]
    tied[1:] |= same
    tied[:-1] |= same
    rows = np.flatnonzero(tied)
    if len(rows):
        candidates = order[rows]
        ranking = np.lexsort((columns["file_index"][candidates], -durations[candidates], ordered[rows]))
        order[rows] = candidates[ranking]
    del ordered, tied, same
    for column in columns:
        columns[column] = columns[column][order]


def _streams(columns: Columns) -> Iterator[NDArray[np.intp]]:
    """Rows of the device work of each stream, by start."""
    category, stream = columns["category"], columns["stream"]
    rows = np.flatnonzero((category <= max(DEVICE_WORK)) & (stream >= 0))
    if not len(rows):
        return
    keys = columns["device"][rows].astype(np.int64) * (int(stream.max()) + 1) + stream[rows]
    order = np.argsort(keys, kind="stable")
    rows, keys = rows[order], keys[order]
    yield from np.split(rows, np.flatnonzero(np.diff(keys)) + 1)


def mend_streams(columns: Columns, found: Counter[str]) -> int:
    """End device records that swallow their stream. In place, on sorted columns.

    Returns:
        Nanoseconds that were cut off.
    """
    clipped_ns = 0
    for rows in _streams(columns):
        starts, durations = columns["start_ns"][rows], columns["duration_ns"][rows]
        if bool((np.diff(columns["file_index"][rows]) < 0).any()):
            found["unsorted"] += int((np.diff(columns["file_index"][rows]) < 0).sum())
        over = np.searchsorted(starts, starts + durations) - np.arange(1, len(rows) + 1)
        for row in np.flatnonzero(over >= FEWEST_SWALLOWED):
            correlation = columns["correlation"][rows]
            later = slice(row + 1, row + 1 + int(over[row]))
            # The parallel branches of one graph launch may be reported on one stream.
            foreign = (correlation[later] != correlation[row]) | (correlation[row] == -1)
            if int(foreign.sum()) < FEWEST_SWALLOWED:
                continue
            length = int(starts[row + 1] - starts[row])
            clipped_ns += int(durations[row]) - length
            durations[row] = length
            over[row] = 0
            found["clipped_duration"] += 1
        columns["duration_ns"][rows] = durations
        if bool((over > 0).any()):
            found["overlapping_kernels"] += int((over > 0).sum())
    return clipped_ns


def _named(table: EventTable, pattern: re.Pattern[str], category: Category) -> NDArray[np.intp]:
    wanted = np.array([pattern.search(name) is not None for name in table.names], dtype=bool)
    if not wanted.any():
        return np.empty(0, dtype=np.intp)
    return np.flatnonzero((table.category == category) & wanted[table.name])


def observe(table: EventTable, found: Counter[str]) -> None:
    """Say what later analyses have to know: graph replay, missing device records, missing steps."""
    work = table.is_device_work()
    correlations = table.correlation[work]
    launched, counts = np.unique(correlations[correlations > 0], return_counts=True)
    calls = np.sort(table.correlation[table.category == Category.RUNTIME])
    launches_each = np.searchsorted(calls, launched, side="right") - np.searchsorted(calls, launched)
    shared = int((counts > np.maximum(launches_each, 1)).sum())
    if shared:
        found["graph_replay"] += shared
    launches = _named(table, _KERNEL_LAUNCH, Category.RUNTIME)
    if len(launches) and not (table.category == Category.KERNEL).any():
        found["no_kernels" if work.any() else "no_device_events"] += len(launches)
    if work.any():
        _observe_graphs(table, launched, found)
    steps = _named(table, re.compile(f"^{_STEP}"), Category.ANNOTATION)
    if not len(steps):
        found["missing_steps"] += 1


def _observe_graphs(table: EventTable, launched: NDArray[Any], found: Counter[str]) -> None:
    graphs = _named(table, _GRAPH_LAUNCH, Category.RUNTIME)
    if not len(graphs):
        return
    last_ns = int(table.start_ns[table.is_device_work()].max())
    # A launch after the last device record may simply have run after the end of the trace.
    graphs = graphs[table.end_ns[graphs] < last_ns]
    empty = ~np.isin(table.correlation[graphs], launched)
    if empty.any() and not empty.all():
        found["graph_replay_incomplete"] += int(empty.sum())
