"""The communication of one rank as plain columns: what remains of it once its events are gone."""

from collections.abc import Mapping

import numpy as np

from drivetrain.trace.classify import COLLECTIVE_KINDS, GROUP_LABELS, Classification
from drivetrain.trace.collectives import CommunicationRecords
from drivetrain.trace.groups import process_groups
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.point_to_point import with_peers
from drivetrain.trace.steps import UNKNOWN_TIME, Steps, launch_times, step_of
from drivetrain.trace.table import Trace

__all__ = ["communication_records"]


def communication_records(
    trace: Trace,
    classes: Classification,
    steps: Steps,
    table: NameTable,
    layout: Mapping[str, int] | None = None,
) -> CommunicationRecords:
    """The communication of a trace, in order of start.

    Args:
        trace: the trace.
        classes: its classification.
        steps: its steps; only numbers that the profiler wrote are the same on every rank.
        table: name tables.
        layout: sizes of the job's parallel dimensions, where known.
    """
    events = trace.events
    rows = np.flatnonzero(classes.is_communication())
    numbers = np.full(len(rows), -1, np.int64)
    if steps.origin == "profiler_step" and len(rows):
        device = events.is_device_work()[rows]
        launched = launch_times(events, rows)
        times = np.where(device & (launched != UNKNOWN_TIME), launched, events.start_ns[rows])
        marks = np.array([-1, *(mark.number for mark in steps.marks)], np.int64)
        numbers = marks[step_of(steps.marks, times) + 1]
    members = _members(trace)
    records = CommunicationRecords(
        start_ns=events.start_ns[rows],
        end_ns=events.end_ns[rows],
        label=tuple(GROUP_LABELS[label] for label in classes.parallel_group[rows].tolist()),
        members=tuple(members[group] for group in events.group[rows].tolist()),
        kind=tuple(COLLECTIVE_KINDS[kind] for kind in classes.collective_kind[rows].tolist()),
        bytes=events.bytes[rows],
        step=numbers,
        peer=np.full(len(rows), -1, np.int64),
        posted_ns=events.start_ns[rows],
    )
    return with_peers(trace, rows, records, table, layout)


def _members(trace: Trace) -> dict[int, frozenset[int] | None]:
    """Index of a process group (-1: none named) → its ranks; empty: all there are; None: unknown."""
    known = process_groups(trace.metadata)
    by_name = {group.name: frozenset(group.ranks) for group in known if group.name}
    distinct = {frozenset(group.ranks) for group in known}
    nameless: frozenset[int] | None = frozenset() if not known else None
    if len(distinct) == 1:
        nameless = next(iter(distinct))
    members: dict[int, frozenset[int] | None] = {-1: nameless}
    for index, text in enumerate(trace.events.groups):
        name, _, description = text.partition("|")
        whole = description == "default_pg" or not known
        members[index] = by_name.get(name) or (frozenset() if whole else None)
    return members
