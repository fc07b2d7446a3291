"""Which backward nodes were made within ranges of the forward pass, by autograd's sequence numbers.

A node has the number of the forward call that made it, and operators carry the number that the next node made on their
thread would get. So the nodes made within a range are those from the number at its beginning up to the one behind its
end.
"""

import re
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.host_context import thread_keys
from drivetrain.trace.lookup import contained, distinct
from drivetrain.trace.table import Category, EventTable

__all__ = ["BackwardNodes"]

_NODE = re.compile(r"autograd::engine::evaluate_function: (.*)", re.DOTALL)


@dataclass(frozen=True, eq=False)
class BackwardNodes:
    """Evaluations of backward nodes, and the ranges of the forward pass that made them; arrays of equal length."""

    rows: NDArray[np.int64]
    """Rows of the evaluations, ascending."""
    maker: NDArray[np.int64]
    """Row of the range."""

    @classmethod
    def made_in(cls, events: EventTable, ranges: NDArray[np.int64]) -> Self:
        """The nodes that were made in some ranges; none where the trace has no numbers.

        Threads count each for themselves, and a node does not say which thread made it: of several ranges that could
        have made it the last one before it is taken.

        Args:
            events: the table.
            ranges: rows of host records, ascending; none within another.
        """
        if len(ranges) == 0:
            return cls(np.empty(0, np.int64), np.empty(0, np.int64))
        is_node, is_call = _roles(events)
        nodes = np.flatnonzero(is_node[events.name] & (events.sequence >= 0))
        maker = np.full(len(nodes), -1, np.int64)
        calls = np.flatnonzero(
            is_call[events.name] & (events.sequence >= 0) & (events.category == np.uint8(Category.CPU_OP))
        )
        call_keys, range_keys = thread_keys(events, calls), thread_keys(events, ranges)
        number = events.sequence[nodes]
        for thread in distinct(range_keys):
            mine = ranges[range_keys == thread]
            first, behind = _numbers(events, mine, calls[call_keys == thread])
            counted = first < behind
            mine, first, behind = mine[counted], first[counted], behind[counted]
            if len(mine) == 0:
                continue
            place = np.searchsorted(first, number, side="right") - 1
            candidate = mine[np.maximum(place, 0)]
            found = (place >= 0) & (number < behind[np.maximum(place, 0)])
            found &= events.start_ns[candidate] < events.start_ns[nodes]
            # Rows are sorted by start.
            maker = np.where(found, np.maximum(maker, candidate), maker)
        made = maker >= 0
        return cls(nodes[made], maker[made])

    def of(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the nodes that some of the ranges made."""
        return self.rows[contained(self.maker, ranges)]


def _roles(events: EventTable) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Over ``events.names``: evaluations of a node; names that are neither one nor what it evaluates.

    What it evaluates carries its number, too. Operators called by it carry none, but where a forward pass is repeated.
    """
    matches = [_NODE.match(name) for name in events.names]
    evaluated = {match[1] for match in matches if match is not None}
    is_node = np.array([match is not None for match in matches], np.bool_)
    is_evaluated = np.array([name in evaluated for name in events.names], np.bool_)
    return is_node, ~is_node & ~is_evaluated


def _numbers(
    events: EventTable, ranges: NDArray[np.int64], calls: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first number of each range, and the one behind its last; equal where it has none. Shape of ``ranges``.

    Args:
        calls: operators of the ranges' thread that carry a number, ascending.
    """
    start, number = events.start_ns[calls], events.sequence[calls]
    begin = np.searchsorted(start, events.start_ns[ranges], side="left")
    end = np.searchsorted(start, events.end_ns[ranges], side="left")
    first, behind = np.zeros(len(ranges), np.int64), np.zeros(len(ranges), np.int64)
    for place in np.flatnonzero(end > begin).tolist():
        numbers = number[begin[place] : end[place]]
        first[place] = numbers.min()
        # The next call tells how many nodes the last one made; without any it made one.
        behind[place] = number[end[place]] if end[place] < len(number) else numbers.max() + 1
    return first, behind
