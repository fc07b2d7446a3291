"""Recomputation: forward work that activation checkpointing repeats inside the backward pass.

Four marks tell it, by the patterns of ``names/<version>/recompute.toml``: Python frames of the checkpoint module,
a trainer's own ranges, the node of re-entrant checkpointing, and operators only a forward pass calls found inside a
backward node. Recomputation the compiler planned inside one compiled backward graph leaves no such mark and is not
told apart.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.host_context import HostPlaces, Ranges, thread_keys, used_names
from drivetrain.trace.lookup import contained, distinct
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.table import Category, EventTable

__all__ = ["recomputed"]


def _rows(events: EventTable, category: Category, patterns: Sequence[re.Pattern[str]]) -> NDArray[np.int64]:
    """Rows of one category whose name any pattern matches."""
    of_category = np.flatnonzero(events.category == category)
    matches = np.zeros(len(events.names), np.bool_)
    for index in used_names(events, of_category):
        matches[index] = any(pattern.search(events.names[index]) for pattern in patterns)
    return of_category[matches[events.name[of_category]]] if len(of_category) else of_category


def recomputed(events: EventTable, places: HostPlaces, table: NameTable) -> NDArray[np.bool_]:
    """Which of the placed records were launched by, or are, repeated forward work; shape of ``places.rows``."""
    marks = table.recompute_marks
    reentrant = _rows(events, Category.CPU_OP, marks["reentrant"])
    backward = _rows(events, Category.CPU_OP, marks["backward"])
    backward = backward[~contained(backward, reentrant)]
    result = np.zeros(len(places.rows), np.bool_)
    for category, mark in ((Category.PYTHON, "frame"), (Category.ANNOTATION, "annotation")):
        result |= Ranges.of(events, _rows(events, category, marks[mark])).contain(places.key, places.time_ns)

    if len(reentrant):
        again = Ranges.of(events, reentrant).contain(places.key, places.time_ns)
        inner = Ranges.of(events, _within(events, backward, reentrant)).contain(places.key, places.time_ns)
        result |= again & ~inner

    forward = _rows(events, Category.CPU_OP, marks["forward_only"])
    return result | _repeated_in(events, backward, forward).contain(places.key, places.time_ns)


def _within(events: EventTable, rows: NDArray[np.int64], outer: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of ``rows`` that start inside a record of ``outer`` on their thread."""
    inside = Ranges.of(events, outer).contain(thread_keys(events, rows), events.start_ns[rows])
    return rows[inside]


def _repeated_in(events: EventTable, backward: NDArray[np.int64], forward: NDArray[np.int64]) -> Ranges:
    """From the start of each backward node to the end of the last forward-only operator in it."""
    backward_keys, forward_keys = thread_keys(events, backward), thread_keys(events, forward)
    key_parts, start_parts, end_parts = [], [], []
    for thread in distinct(forward_keys) if len(backward) else ():
        nodes = backward[backward_keys == thread]
        mine = forward[forward_keys == thread]
        if len(nodes) == 0:
            continue
        starts, ends = events.start_ns[nodes], events.end_ns[nodes]
        node = np.searchsorted(starts, events.start_ns[mine], side="right") - 1
        inside = (node >= 0) & (events.end_ns[mine] <= ends[np.maximum(node, 0)])
        last = np.full(len(nodes), -1, np.int64)
        np.maximum.at(last, node[inside], events.end_ns[mine][inside])
        repeated = last >= 0
        key_parts.append(np.full(int(repeated.sum()), thread, np.int64))
        start_parts.append(starts[repeated])
        end_parts.append(last[repeated])
    if not key_parts:
        return Ranges({})
    return Ranges.merged(np.concatenate(key_parts), np.concatenate(start_parts), np.concatenate(end_parts))
