"""The split of one trace's time by class: disjoint intervals, by the priorities of the account.

The arithmetic is one exact partition (:func:`drivetrain.measure.intervals.partition`) of everything that was recorded:
compute before communication before copies before causes on the host. Windows are cut out of it afterwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from drivetrain.measure.account import COMPUTE_CLASSES, COPY_CLASSES, UNCLASSIFIED, View
from drivetrain.measure.intervals import EMPTY, Intervals, partition, union, union_of
from drivetrain.trace.classify import CLASSES, Classification, classify
from drivetrain.trace.host import HostRecords, host_compute
from drivetrain.trace.lookup import distinct
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.steps import Steps, find_steps
from drivetrain.trace.table import EventTable, Trace

__all__ = ["RankTimeline", "StepWindow", "timeline_of"]

StepWindow = Literal["device", "cpu"]
"""``device``: a step's window is that of its device work. ``cpu``: its ``ProfilerStep`` range on the host."""


@dataclass(frozen=True, eq=False)
class RankTimeline:
    """The split of one rank's time, as disjoint intervals: what a figure draws and what windows are cut out of."""

    rank: int | None
    view: View
    parts: Mapping[str, Intervals]
    """Class → when it took the time; of communication the part that nothing covers, under ``communication``. What
    no class covers is idle."""
    communication: Intervals
    """All communication, covered or not."""
    compute: Intervals
    copies: Intervals
    busy: Intervals
    whole: tuple[int, int]
    """Start and end of the window of the whole trace, ns."""
    steps: Steps
    explained: bool
    """Whether there are records that would show a cause of idleness; else idle time is unexplained."""


def timeline_of(
    trace: Trace,
    classes: Classification | None = None,
    *,
    step_window: StepWindow = "device",
    rules: NameTable | None = None,
) -> RankTimeline:
    """Split one trace's time by class.

    Args:
        trace: a trace of any reader, with at least one event.
        classes: its classification, where there is one already.
        step_window: ``cpu`` infers no steps.
        rules: name tables; the built-in ones where None.
    """
    table = NameTable.load() if rules is None else rules
    classes = classify(trace, table) if classes is None else classes
    events = trace.events
    steps = find_steps(events, infer=step_window == "device")
    host = HostRecords(events, classes, table)
    on_device = events.is_device_work()
    view: View = "device" if on_device.any() else "host"
    if view == "device":
        work = _device_sets(events, np.flatnonzero(on_device), classes)
        whole = (int(events.start_ns[on_device].min()), int(events.end_ns[on_device].max()))
    else:
        work = {**host_compute(host), "communication": _communication(events, classes)}
        work["copy.h2d"] = host.h2d()
        whole = _host_window(events, host, steps)
    copies = [*COPY_CLASSES, UNCLASSIFIED]
    order = [*COMPUTE_CLASSES, "communication", *copies]
    causes = host.causes()
    sets = [work.get(name, EMPTY) for name in order] + list(causes.values())
    parts = dict(zip([*order, *causes], partition(sets), strict=True))
    return RankTimeline(
        rank=trace.rank,
        view=view,
        parts={name: part for name, part in parts.items() if len(part)},
        communication=work.get("communication", EMPTY),
        compute=union_of([work.get(name, EMPTY) for name in COMPUTE_CLASSES]),
        copies=union_of([work.get(name, EMPTY) for name in COPY_CLASSES]),
        busy=union_of([work.get(name, EMPTY) for name in order]),
        whole=whole,
        steps=steps,
        explained=host.complete,
    )


def _communication(events: EventTable, classes: Classification) -> Intervals:
    mask = classes.is_communication()
    starts = events.start_ns[mask]
    return union(starts, starts + events.duration_ns[mask])


def _device_sets(events: EventTable, rows: NDArray[np.intp], classes: Classification) -> dict[str, Intervals]:
    """Class → union of the device records of that class."""
    kind, again = classes.kind[rows], classes.recompute[rows]
    starts = events.start_ns[rows]
    ends = starts + events.duration_ns[rows]
    sets: dict[str, list[Intervals]] = {"recompute": [union(starts[again], ends[again])]}
    for index in distinct(kind).tolist():
        mine = (kind == index) & ~again
        # A record of device work is never nothing: what no rule places computes something.
        name = "compute.other" if CLASSES[index] == "none" else CLASSES[index]
        sets.setdefault(name, []).append(union(starts[mine], ends[mine]))
    return {name: union_of(parts) for name, parts in sets.items()}


def _host_window(events: EventTable, host: HostRecords, steps: Steps) -> tuple[int, int]:
    if steps.marks:
        return steps.marks[0].start_ns, max(mark.end_ns for mark in steps.marks)
    rows = host.is_host
    if not rows.any():
        return int(events.start_ns.min()), int(events.end_ns.max())
    return int(events.start_ns[rows].min()), int(events.end_ns[rows].max())
