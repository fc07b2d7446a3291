"""Which records lie around a moment of a thread: the operators, ranges and Python frames it is called from."""

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.host_context import thread_keys
from drivetrain.trace.table import EventTable

__all__ = ["Enclosing"]

_BLOCK = 256


class Enclosing:
    """Some host records, made ready to be asked what encloses a moment.

    Meant for a few thousand questions about millions of records: each looks at the longest reach of blocks of records
    and opens only the blocks that reach the moment.
    """

    def __init__(self, events: EventTable, rows: NDArray[np.int64]) -> None:
        """Prepare.

        Args:
            events: the table.
            rows: rows of host records, ascending (and so by start, longest first).
        """
        self._rows: dict[int, NDArray[np.int64]] = {}
        self._times: dict[int, tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = {}
        keys = thread_keys(events, rows)
        order = np.argsort(keys, kind="stable")
        borders = np.flatnonzero(np.diff(keys[order])) + 1
        for part in np.split(order, borders) if len(order) else ():
            mine = rows[part]
            start, end = events.start_ns[mine], events.end_ns[mine]
            reach = np.maximum.reduceat(end, np.arange(0, len(end), _BLOCK))
            key = int(keys[part[0]])
            self._rows[key], self._times[key] = mine, (start, end, reach)

    @property
    def threads(self) -> tuple[int, ...]:
        """Keys (``host_context.thread_keys``) of the threads that have any of the records."""
        return tuple(self._rows)

    def around(self, thread: int, start_ns: int, end_ns: int) -> NDArray[np.int64]:
        """Rows on a thread that last from ``start_ns`` or before to ``end_ns`` or after, outermost first."""
        if thread not in self._rows:
            return np.empty(0, np.int64)
        start, end, reach = self._times[thread]
        begun = int(np.searchsorted(start, start_ns, side="right"))
        blocks = np.flatnonzero(reach[: -(-begun // _BLOCK)] >= end_ns)
        places = (blocks[:, None] * _BLOCK + np.arange(_BLOCK)[None, :]).ravel()
        places = places[places < begun]
        return np.asarray(self._rows[thread][places[end[places] >= end_ns]])
