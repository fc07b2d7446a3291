"""Membership and distinct values of small integers by table.

Categories, classes, names and threads are small indices repeated a million times. ``np.isin`` and ``np.unique`` sort
or hash them; a table of their range answers in one pass. Wide ranges (correlations that jump) are searched in order.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["contained", "distinct", "flags"]

Integers = NDArray[np.integer]

_LEAST_TABLE = 1 << 16
"""A table up to this size is small whatever the number of values."""


def flags(size: int, members: Sequence[int]) -> NDArray[np.bool_]:
    """Table of ``size`` entries that are True at ``members``: ``flags(n, m)[ids]`` is whether each id is one."""
    table = np.zeros(size, np.bool_)
    table[list(members)] = True
    return table


def _table_size(ids: Integers, members: Integers) -> int | None:
    """One more than the largest value, where a table of it is no larger than a few times the values; else None."""
    if min(int(ids.min()), int(members.min())) < 0:
        return None
    size = max(int(ids.max()), int(members.max())) + 1
    return size if size <= max(4 * len(ids), _LEAST_TABLE) else None


def contained(ids: Integers, members: Integers) -> NDArray[np.bool_]:
    """Whether each id is among ``members``; shape of ``ids``."""
    if len(ids) == 0 or len(members) == 0:
        return np.zeros(len(ids), np.bool_)
    size = _table_size(ids, members)
    if size is not None:
        table = np.zeros(size, np.bool_)
        table[members] = True
        return table[ids]
    ordered = np.sort(members)
    place = np.minimum(np.searchsorted(ordered, ids), len(ordered) - 1)
    return np.asarray(ordered[place] == ids)


def distinct(ids: Integers) -> NDArray[np.int64]:
    """The values that occur, each once, ascending."""
    if len(ids) == 0:
        return np.zeros(0, np.int64)
    size = _table_size(ids, ids)
    if size is not None:
        table = np.zeros(size, np.bool_)
        table[ids] = True
        return np.flatnonzero(table)
    ordered = np.sort(ids)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))].astype(np.int64)
