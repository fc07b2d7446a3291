"""The bubble of a pipeline: when a stage waits for its neighbours because the pipeline fills, drains or is uneven.

A step of a stage has three phases, told by its own compute: it *fills* until the first backward work begins, is
*steady* until the last forward work ends, and *drains* until its update begins. Waiting in them is ``bubble.warmup``,
``bubble.imbalance`` and ``bubble.cooldown``: with equal stages and one forward and one backward each the first and the
last of them are all there is. What is waiting only other ranks can tell (:mod:`drivetrain.trace.ranks`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from drivetrain.measure.account import BUBBLE_CLASSES
from drivetrain.measure.intervals import EMPTY, Intervals, complement, intersect, subtract, union, union_of
from drivetrain.trace.classes import CLASS_INDEX
from drivetrain.trace.classify import Classification
from drivetrain.trace.collectives import POINT_TO_POINT_KINDS, CommunicationRecords
from drivetrain.trace.host_context import Ranges, host_places, own_places, used_names
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.steps import UNKNOWN_TIME, cpu_windows, device_windows
from drivetrain.trace.table import Category, Trace
from drivetrain.trace.timeline import RankTimeline

__all__ = ["WAITING", "PipelineFacts", "bubble_parts", "pipeline_of"]

WAITING = "communication.pp.wait"
"""The class that the bubble is taken from."""


@dataclass(frozen=True, eq=False)
class PipelineFacts:
    """What of a pipeline stage is needed to find its bubble once its events are gone."""

    phases: Mapping[str, Intervals]
    """Class of the bubble → when waiting is of that class, on the rank's own clock; disjoint."""
    idle_since_ns: NDArray[np.int64]
    """Shape (k,), for each record of communication the start of the stretch before it that shows no record of
    anything; its own start where something ran until then."""


@dataclass(frozen=True, eq=False)
class _Work:
    """Compute of one trace but for the update: starts, ends, and which of it is of the backward pass."""

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    backward: NDArray[np.bool_]
    layers: NDArray[np.bool_]
    """Matrix products and attention: a pass through the stage, not an addition or a buffer's zeros beside it."""
    updates_ns: NDArray[np.int64]
    """Starts of the optimizer's work, sorted."""


def pipeline_of(
    trace: Trace,
    classes: Classification,
    line: RankTimeline,
    records: CommunicationRecords,
    table: NameTable,
) -> tuple[CommunicationRecords, PipelineFacts | None]:
    """The phases of a pipeline stage; None of a rank that is none, or whose backward work nothing tells.

    Returns:
        The records, with the sends and receives of an unnamed group labelled ``pp`` where they go through the stages
        as a pipeline's do; and the phases.
    """
    kinds, labels = np.array(records.kind, np.str_), np.array(records.label, np.str_)
    between = np.isin(kinds, list(POINT_TO_POINT_KINDS))
    unnamed = between & np.isin(labels, ["unknown", "world"]) & (records.peer >= 0)
    if not (between & (labels == "pp")).any() and not unnamed.any():
        return records, None
    work = _work(trace, classes, table)
    if unnamed.any() and _goes_through_stages(
        records, np.flatnonzero(unnamed & (kinds == "send")), trace.rank, work
    ):
        labels = np.where(unnamed, "pp", labels)
        records = replace(records, label=tuple(labels.tolist()))
    if not (between & (labels == "pp")).any():
        return records, None
    by_device = line.view == "device"
    windows = device_windows(trace.events, line.steps) if by_device else cpu_windows(line.steps)
    phases = _phases(windows, work)
    if phases is None:
        return records, None
    covered = union_of([*line.parts.values(), line.busy])
    return records, PipelineFacts(phases, _idle_since(records, covered, int(windows.min())))


def _work(trace: Trace, classes: Classification, table: NameTable) -> _Work:
    events = trace.events
    rows = np.flatnonzero(classes.is_compute())
    update = classes.kind[rows] == np.uint8(CLASS_INDEX["compute.optimizer"])
    updates = np.sort(events.start_ns[rows[update]])
    rows = rows[~update]
    places = own_places(events, rows) if classes.host_view else host_places(events, rows)
    operators = np.flatnonzero(events.category == np.uint8(Category.CPU_OP))
    marks = table.recompute_marks
    matches = np.zeros(len(events.names), np.bool_)
    for index in used_names(events, operators):
        name = events.names[index]
        matches[index] = any(one.search(name) for mark in ("backward", "reentrant") for one in marks[mark])
    nodes = operators[matches[events.name[operators]]]
    backward = Ranges.of(events, nodes).contain(places.key, places.time_ns)
    layers = np.isin(classes.kind[rows], [CLASS_INDEX["compute.matmul"], CLASS_INDEX["compute.attention"]])
    return _Work(events.start_ns[rows], events.end_ns[rows], backward, layers, updates)


def _goes_through_stages(
    records: CommunicationRecords, sends: NDArray[np.int64], rank: int | None, work: _Work
) -> bool:
    """Whether every send to a later stage follows forward work and every send to an earlier one backward work.

    A ring that passes keys and values on sends to the same neighbour in both passes.
    """
    passes = np.flatnonzero(work.layers)
    if rank is None or len(sends) == 0 or len(np.unique(work.backward[passes])) < 2:
        return False
    order = passes[np.argsort(work.end_ns[passes], kind="stable")]
    last = np.searchsorted(work.end_ns[order], records.posted_ns[sends], side="right") - 1
    if np.any(last < 0):
        return False
    follows_backward = work.backward[order[last]]
    return bool(np.array_equal(follows_backward, records.peer[sends] < rank))


def _phases(windows: NDArray[np.int64], work: _Work) -> dict[str, Intervals] | None:
    """Class of the bubble → its stretches, over all steps that have forward and backward work."""
    found: list[tuple[int, int, int, int]] = []
    for start, end in windows.tolist():
        inside = (work.start_ns >= start) & (work.start_ns < end)
        backward, forward = inside & work.backward, inside & ~work.backward
        if not backward.any() or not forward.any():
            continue
        first_backward = int(work.start_ns[backward].min())
        last_backward = min(int(work.end_ns[backward].max()), end)
        # What computes after the last backward work (norms of gradients, logging) is no forward pass.
        forward &= work.start_ns < last_backward
        if not forward.any():
            continue
        passes = forward & work.layers
        last_forward = int(work.end_ns[passes if passes.any() else forward].max())
        steady_end = min(max(last_forward, first_backward), end)
        update = np.searchsorted(work.updates_ns, last_backward)
        over = int(work.updates_ns[update]) if update < len(work.updates_ns) else end
        found.append((start, first_backward, steady_end, max(min(over, end), steady_end)))
    if not found:
        return None
    bounds = np.array(found, np.int64)
    names = ("bubble.warmup", "bubble.imbalance", "bubble.cooldown")
    phases = {name: union(bounds[:, i], bounds[:, i + 1]) for i, name in enumerate(names)}
    taken = EMPTY
    for name in names:  # Windows of steps on the host may overlap.
        phases[name], taken = subtract(phases[name], taken), union_of((taken, phases[name]))
    return phases


def _idle_since(records: CommunicationRecords, covered: Intervals, first_ns: int) -> NDArray[np.int64]:
    """Since when nothing in `covered` ran, when each record began: its start where something did; `first_ns` at the
    earliest."""
    if len(covered) == 0:
        return records.start_ns.copy()
    place = np.searchsorted(covered[:, 0], records.start_ns)
    before = np.where(place > 0, covered[np.maximum(place - 1, 0), 1], first_ns)
    return np.minimum(before, records.start_ns)


def bubble_parts(
    facts: PipelineFacts,
    records: CommunicationRecords,
    splits: NDArray[np.int64],
    waiting: Intervals,
) -> dict[str, Intervals]:
    """The classes of the bubble, and what is left of the pipeline's waiting.

    Args:
        facts: phases of the stage.
        records: its communication.
        splits: shape (k,), when waiting ended in each record, `UNKNOWN_TIME` where nobody can tell.
        waiting: exposed waiting of class `WAITING`.
    """
    kinds, labels = np.array(records.kind, np.str_), np.array(records.label, np.str_)
    receives = np.isin(kinds, ["recv", "send_recv"]) & (labels == "pp") & (splits != UNKNOWN_TIME)
    # Idle before a receive began, as long as there was nothing to receive: the stage would have waited in it.
    ends = np.minimum(records.start_ns, splits)[receives]
    idle = union(facts.idle_since_ns[receives], ends)
    stalled = union_of((waiting, idle))
    parts = {name: intersect(stalled, facts.phases[name]) for name in BUBBLE_CLASSES}
    bubble = union_of(list(parts.values()))
    return {**parts, WAITING: intersect(waiting, complement(bubble))}
