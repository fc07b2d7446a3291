"""Exact algebra of time intervals, in integer nanoseconds.

An *interval set* is an int64 array of shape (n, 2), one half-open interval ``[start, end)`` a row, sorted,
disjoint, not touching and without empty rows: :func:`union` makes one of any intervals, and every function
here returns one. Half open, so that an interval that ends where the next one starts overlaps it by nothing,
and lengths add up. No floats: sums of nanoseconds are exact.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EMPTY",
    "Intervals",
    "clip",
    "complement",
    "intersect",
    "partition",
    "subtract",
    "total",
    "total_within",
    "union",
    "union_of",
]

Intervals = NDArray[np.int64]
"""Shape (n, 2): start and end of each interval, int64, ns."""

EMPTY: Intervals = np.empty((0, 2), np.int64)
EMPTY.flags.writeable = False

_FIRST = np.iinfo(np.int64).min
_LAST = np.iinfo(np.int64).max


def union(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Intervals:
    """The interval set that covers what any of the given intervals covers.

    Args:
        starts: shape (n,), in any order.
        ends: shape (n,). An interval that ends where it starts, or before, covers nothing.
    """
    kept = ends > starts
    if not kept.all():
        starts, ends = starts[kept], ends[kept]
    if len(starts) == 0:
        return EMPTY
    if np.any(starts[1:] < starts[:-1]):
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    opens = np.empty(len(starts), np.bool_)
    opens[0] = True
    np.greater(starts[1:], reach[:-1], out=opens[1:])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(starts)) - 1
    return np.column_stack((starts[first], reach[last]))


def union_of(sets: Sequence[Intervals]) -> Intervals:
    """The union of some interval sets."""
    filled = [intervals for intervals in sets if len(intervals)]
    if not filled:
        return EMPTY
    if len(filled) == 1:
        return filled[0]
    joined = np.concatenate(filled)
    return union(joined[:, 0], joined[:, 1])


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """What both interval sets cover. Pieces that touch in only one of them stay two pieces of the other."""
    if len(left) == 0 or len(right) == 0:
        return EMPTY
    # For each interval of `left`, the run of intervals of `right` that overlap it.
    low = np.searchsorted(right[:, 1], left[:, 0], side="right")
    high = np.searchsorted(right[:, 0], left[:, 1], side="left")
    counts = np.maximum(high - low, 0)
    mine = np.repeat(np.arange(len(left)), counts)
    before = np.cumsum(counts) - counts
    theirs = np.arange(len(mine)) - np.repeat(before - low, counts)
    starts = np.maximum(left[mine, 0], right[theirs, 0])
    ends = np.minimum(left[mine, 1], right[theirs, 1])
    return np.column_stack((starts, ends))


def complement(intervals: Intervals) -> Intervals:
    """Everything an int64 can name that the interval set does not cover (its last value apart)."""
    starts = np.concatenate(([_FIRST], intervals[:, 1]))
    ends = np.concatenate((intervals[:, 0], [_LAST]))
    kept = ends > starts
    return np.column_stack((starts[kept], ends[kept]))


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """What `left` covers and `right` does not."""
    if len(left) == 0 or len(right) == 0:
        return left
    return intersect(left, complement(right))


def clip(intervals: Intervals, start: int, end: int) -> Intervals:
    """The part within ``[start, end)``."""
    if end <= start:
        return EMPTY
    return intersect(intervals, np.array([[start, end]], np.int64))


def total(intervals: Intervals) -> int:
    """Length of an interval set in ns."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def total_within(intervals: Intervals, windows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Covered length inside each window, in ns.

    Args:
        intervals: an interval set.
        windows: shape (m, 2), start and end of each window; they may overlap and come in any order.

    Returns:
        Shape (m,), int64.
    """
    if len(intervals) == 0 or len(windows) == 0:
        return np.zeros(len(windows), np.int64)
    lengths = intervals[:, 1] - intervals[:, 0]
    before = np.concatenate(([0], np.cumsum(lengths)))

    def covered_until(times: NDArray[np.int64]) -> NDArray[np.int64]:
        index = np.searchsorted(intervals[:, 0], times, side="right")
        # The last interval that has begun may reach beyond the time: take off what lies behind.
        begun = np.maximum(index - 1, 0)
        beyond = np.where(index > 0, np.maximum(intervals[begun, 1] - times, 0), 0)
        return np.asarray(before[index] - beyond, np.int64)

    starts = windows[:, 0]
    ends = np.maximum(windows[:, 1], starts)
    return covered_until(ends) - covered_until(starts)


def partition(sets: Sequence[Intervals], window: tuple[int, int] | None = None) -> list[Intervals]:
    """Split overlapping interval sets by priority: time covered by several belongs to the first of them.

    Args:
        sets: interval sets, the most important first.
        window: clip everything to this start and end.

    Returns:
        As many interval sets as were given, pairwise disjoint, with the same union (inside the window). With a
        window one more is appended: what none covers, so that the lengths add up to the window's.
    """
    taken = EMPTY
    parts: list[Intervals] = []
    for intervals in sets:
        inside = intervals if window is None else clip(intervals, *window)
        parts.append(subtract(inside, taken))
        taken = union_of((taken, inside))
    if window is not None:
        whole = np.array([window], np.int64) if window[1] > window[0] else EMPTY
        parts.append(subtract(whole, taken))
    return parts
