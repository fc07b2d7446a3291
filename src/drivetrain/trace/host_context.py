"""Where on the host a device record was launched: the launch, the operator around it, the ranges it lies in.

Device records are joined with launches by correlation and with operators by external id. A record's *place* is a
point on a host thread: its launch where the launching thread also runs operators, else the start of its operator
(older profilers name the two threads differently). Membership in ranges is tested for all records at once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.lookup import contained, distinct
from drivetrain.trace.table import Category, EventTable

__all__ = [
    "HostPlaces",
    "Ranges",
    "host_places",
    "launch_rows",
    "own_places",
    "thread_keys",
    "used_names",
]


def thread_keys(events: EventTable, rows: NDArray[Any] | slice = slice(None)) -> NDArray[np.int64]:
    """One number per (process, thread) of each row."""
    return events.process[rows].astype(np.int64) * (len(events.threads) + 1) + events.thread[rows]


def used_names(events: EventTable, rows: NDArray[Any]) -> NDArray[np.int64]:
    """Indices into ``events.names`` of the names of some rows, each once."""
    used = np.zeros(len(events.names), np.bool_)
    used[events.name[rows]] = True
    return np.flatnonzero(used)


@dataclass(frozen=True, eq=False)
class HostPlaces:
    """Places on the host of some rows of an event table; all arrays have the length of ``rows``."""

    rows: NDArray[np.int64]
    launch: NDArray[np.int64]
    """Row of the launch (a runtime call), -1 where unknown."""
    operator: NDArray[np.int64]
    """Row of the innermost operator around the launch, -1 where unknown."""
    key: NDArray[np.int64]
    """Thread (:func:`thread_keys`) of the place, -1 where unknown."""
    time_ns: NDArray[np.int64]


def _first_row_of(
    values: NDArray[np.int64], rows: NDArray[np.int64], wanted: NDArray[np.int64]
) -> NDArray[np.int64]:
    """For each wanted value the first of ``rows`` whose value it is; -1 where none, or where it is negative."""
    if np.any(values[1:] < values[:-1]):
        order = np.argsort(values, kind="stable")
        values, rows = values[order], rows[order]
    return _first_in_order(values, rows, wanted)


def _first_in_order(
    ordered: NDArray[np.int64], rows: NDArray[np.int64], wanted: NDArray[np.int64]
) -> NDArray[np.int64]:
    """:func:`_first_row_of` of ascending values."""
    if len(rows) == 0:
        return np.full(len(wanted), -1, np.int64)
    position = np.minimum(np.searchsorted(ordered, wanted), len(rows) - 1)
    found = (ordered[position] == wanted) & (wanted >= 0)
    return np.where(found, rows[position], -1)


def launch_rows(events: EventTable, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """Row of the call that launched each of some device records, by correlation; -1 where none is known.

    A graph launch serves many kernels; of several calls under one correlation the first is the launch.
    """
    return _first_in_order(*events.launches, events.correlation[rows])


def host_places(events: EventTable, rows: NDArray[np.int64]) -> HostPlaces:
    """Join device records with their launches and operators."""
    operators = np.flatnonzero((events.category == Category.CPU_OP) & (events.external_id >= 0))
    launch = launch_rows(events, rows)
    launched = launch >= 0
    external = events.external_id[rows].copy()
    external[launched] = np.where(
        events.external_id[launch[launched]] >= 0, events.external_id[launch[launched]], external[launched]
    )
    operator = _first_row_of(events.external_id[operators], operators, external)

    operator_threads = distinct(thread_keys(events, operators))
    place = np.where(launched & contained(thread_keys(events, launch), operator_threads), launch, -1)
    place = np.where(place < 0, operator, place)
    place = np.where(place < 0, launch, place)
    known = place >= 0
    return HostPlaces(
        rows=rows,
        launch=launch,
        operator=operator,
        key=np.where(known, thread_keys(events, place), -1),
        time_ns=np.where(known, events.start_ns[place], -1),
    )


def own_places(events: EventTable, rows: NDArray[np.int64]) -> HostPlaces:
    """Places of host records: their own threads and starts."""
    none = np.full(len(rows), -1, np.int64)
    return HostPlaces(rows, none, rows, thread_keys(events, rows), events.start_ns[rows])


@dataclass(frozen=True, eq=False)
class Ranges:
    """Closed ranges on threads, merged where they overlap: per thread sorted starts and ends."""

    threads: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]

    @classmethod
    def merged(cls, key: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64]) -> "Ranges":
        """Union of ranges given by thread, start and end, all of shape (m,)."""
        threads = {}
        for thread in distinct(key):
            mine = key == thread
            order = np.argsort(start[mine], kind="stable")
            starts, ends = start[mine][order], np.maximum.accumulate(end[mine][order])
            first = np.concatenate(([True], starts[1:] > ends[:-1]))
            last = np.concatenate((first[1:], [True]))
            threads[int(thread)] = (starts[first], ends[last])
        return cls(threads)

    @classmethod
    def of(cls, events: EventTable, rows: NDArray[Any]) -> "Ranges":
        """Union of the ranges of some host records."""
        return cls.merged(thread_keys(events, rows), events.start_ns[rows], events.end_ns[rows])

    def contain(self, key: NDArray[np.int64], time_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each point (thread, time) lies in a range; borders count."""
        inside = np.zeros(len(key), np.bool_)
        for thread, (starts, ends) in self.threads.items():
            mine = np.flatnonzero(key == thread)
            position = np.searchsorted(starts, time_ns[mine], side="right") - 1
            inside[mine] = (position >= 0) & (time_ns[mine] <= ends[np.maximum(position, 0)])
        return inside


def working_operators(
    events: EventTable, light: NDArray[np.bool_], heavy: NDArray[np.bool_], helper: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Rows of the operators that do the work themselves, none inside another.

    Those that call no operator at all, and those whose own arithmetic lies between helpers they call: ``aten::addmm``
    copies its bias by ``aten::copy_`` and multiplies by itself.

    Args:
        events: the table.
        light: mask over ``events.names``: arithmetic that may call helpers.
        heavy: mask over ``events.names``: arithmetic that may call helpers and light operators.
        helper: mask over ``events.names``: allocations, views and copies.
    """
    rows = np.flatnonzero(events.category == Category.CPU_OP)
    keys = thread_keys(events, rows)
    parts = [
        mine[_working_of_thread(events, mine, light, heavy, helper)]
        for mine in (rows[keys == key] for key in distinct(keys))
    ]
    return np.sort(np.concatenate(parts)) if parts else rows


def _working_of_thread(
    events: EventTable,
    rows: NDArray[np.int64],
    light: NDArray[np.bool_],
    heavy: NDArray[np.bool_],
    helper: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Mask over the operators of one thread, which are sorted by start, longest first: descendants follow."""
    name, start = events.name[rows], events.start_ns[rows]
    first = np.arange(1, len(rows) + 1)
    last = np.maximum(np.searchsorted(start, events.end_ns[rows], side="left"), first)

    def descendants(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """How many operators of a mask over names each operator calls, directly or not."""
        before = np.concatenate(([0], np.cumsum(mask[name])))
        return np.asarray(before[last] - before[first], np.int64)

    working = last == first
    working |= light[name] & (descendants(~helper) == 0)
    working |= heavy[name] & (descendants(~(helper | light)) == 0)
    steps = np.zeros(len(rows) + 1, np.int64)
    np.add.at(steps, first[working], 1)
    np.add.at(steps, last[working], -1)
    return np.asarray(working & (np.cumsum(steps)[:-1] == 0))
