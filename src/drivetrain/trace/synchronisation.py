"""Where the host waits for the device, by the operator that made it wait and the line of Python it was called from.

A call that waits costs twice: the device may have nothing to do while the host is in it, and when it returns the
device's queue is empty, so that the device stands still until the host has launched its next piece of work. The second
part is often the larger one, and no record shows it. Both together count for at most the time the host was in the call:
without it the host would have been earlier by that much and no more.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.measure.intervals import Intervals, total_within, union
from drivetrain.trace.classify import Classification
from drivetrain.trace.enclosing import Enclosing
from drivetrain.trace.host import HostRecords
from drivetrain.trace.host_context import thread_keys, used_names
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.observe import observed_rows
from drivetrain.trace.steps import Steps, find_steps
from drivetrain.trace.table import Category, EventTable, Trace

__all__ = [
    "STACK_HINT",
    "SynchronisationPoint",
    "Synchronisations",
    "is_users_frame",
    "synchronisations",
]

MOST_CALLS = 5_000
"""Calls whose surroundings are looked up; of more, those the host waited in longest."""

STACK_HINT = (
    "the trace has no Python functions: record it with torch.profiler.profile(with_stack=True), or a run of ours with "
    "profiler.with_stack=true, to see the lines"
)

_BLOCKING_COPY = re.compile(r"(cuda|hip|musa)Memcpy(2D|3D|ToSymbol|FromSymbol)?$")
_COPY = re.compile(r"(cuda|hip|musa)Memcpy")
_SCALAR = "aten::_local_scalar_dense"
_ON_HOST = re.compile(r"aten::(item|_local_scalar_dense|nonzero)$")
"""Operators that would wait for a device. Without device records they are all there is to see."""

_NO_CALLER = re.compile(r"autograd::engine::|\w*Backward\d*$|torch::autograd::")
_STEP = re.compile(r"ProfilerStep")
_NOT_THE_USERS = re.compile(
    r"<(built-in|frozen|method|string|slot|unknown)|nn\.Module: |.*\b(torch|torchgen|triton|functorch)/"
    r"|(contextlib|threading|functools|runpy|selectors|queue|socket|subprocess|concurrent/|multiprocessing/|asyncio/)"
)
"""Names of Python frames that are not the training code's own; matched at their start."""


def is_users_frame(name: str) -> bool:
    """Whether a Python frame is the training code's own: neither torch's nor Python's."""
    return _NOT_THE_USERS.match(name) is None


@dataclass(frozen=True)
class SynchronisationPoint:
    """All waiting calls of one kind from one place. Times are sums over the recorded steps, in ns."""

    call: str
    """What waits: ``cudaStreamSynchronize``; in a trace without a device the operator that would."""
    operators: tuple[str, ...]
    """The operators around it, outermost first; the first is what the training code called."""
    range: str | None
    """The innermost annotated range around it, steps left out."""
    frame: str | None
    """The innermost Python frame around it that is neither torch's nor Python's own: ``train.py(10): step``. The line
    is where the function begins, which is what the profiler records. None where no Python functions were recorded."""
    frame_is_callers: bool
    """True: the call came from another thread (the backward pass), and the frame is that of the thread that waits for
    it."""
    calls: int
    waited_ns: int
    """Time the host spent in the calls."""
    idle_ns: int | None
    """Part of it in which the device had nothing to do; None without device records."""
    restart_ns: int | None
    """Time the device then stood still until its next work began (at most until the next waiting call), as far as the
    wait can have caused it: with ``idle_ns`` at most what the call itself took."""

    @property
    def device_ns(self) -> int:
        """Device time it cost."""
        return (self.idle_ns or 0) + (self.restart_ns or 0)

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "call": self.call,
            "operators": list(self.operators),
            "range": self.range,
            "frame": self.frame,
            "frame_is_callers": self.frame_is_callers,
            "calls": self.calls,
            "waited_ns": self.waited_ns,
            "idle_ns": self.idle_ns,
            "restart_ns": self.restart_ns,
        }


@dataclass(frozen=True)
class Synchronisations:
    """The waiting calls of one trace's steps."""

    points: tuple[SynchronisationPoint, ...]
    """Those that cost the device most first (without a device: the host)."""
    num_steps: int
    """0: the trace has no steps, and the points are of all of it."""
    has_device: bool
    hint: str | None
    """How to see the Python lines, where they were not recorded."""
    left_out: int
    """Calls beyond the :data:`MOST_CALLS` longest ones, which are in no point."""


def synchronisations(
    trace: Trace,
    classes: Classification,
    steps: Steps | None = None,
    *,
    rules: NameTable | None = None,
) -> Synchronisations:
    """The calls on the training threads that waited for the device.

    Args:
        trace: one rank's.
        classes: its classification.
        steps: its steps; found here where None.
        rules: name tables; the built-in ones where None.
    """
    events = trace.events
    table = NameTable.load() if rules is None else rules
    steps = find_steps(events) if steps is None else steps
    main = HostRecords(events, classes, table).main_threads
    within = np.zeros(len(events), np.bool_)
    within[observed_rows(events, steps)] = True
    rows = _waiting_rows(events, table, main & within, host_view=classes.host_view)
    rows = _outermost(events, rows)
    left_out = max(0, len(rows) - MOST_CALLS)
    if left_out:
        longest = np.argsort(-events.duration_ns[rows], kind="stable")[:MOST_CALLS]
        rows = np.sort(rows[longest])
    idle, restart = (None, None) if classes.host_view else _device_cost(events, rows)
    python = np.flatnonzero(events.category == Category.PYTHON)
    return Synchronisations(
        points=_points(events, rows, python, idle, restart),
        num_steps=len(steps.marks),
        has_device=not classes.host_view,
        hint=STACK_HINT if len(rows) and len(python) == 0 else None,
        left_out=left_out,
    )


# ---- which calls wait -------------------------------------------------------------------------------------------


def _waiting_rows(
    events: EventTable, table: NameTable, allowed: NDArray[np.bool_], *, host_view: bool
) -> NDArray[np.int64]:
    """Rows of calls that wait, among some host rows."""
    runtime = np.flatnonzero(allowed & (events.category == Category.RUNTIME))
    operators = np.flatnonzero(allowed & (events.category == Category.CPU_OP))
    if host_view:
        return operators[_mask(events, operators, lambda name: _ON_HOST.match(name) is not None)]
    waits = _mask(
        events,
        runtime,
        lambda name: table.label("cause", name) == "host.sync" or _BLOCKING_COPY.match(name) is not None,
    )
    waiting = runtime[waits]
    # A scalar read back waits for its copy, although some versions record no synchronising call for it. One that
    # copies nothing was read from the host's own memory.
    scalars = operators[_mask(events, operators, lambda name: name == _SCALAR)]
    copies = runtime[_mask(events, runtime, lambda name: _COPY.match(name) is not None)]
    silent = (_held(events, scalars, copies) > 0) & (_held(events, scalars, waiting) == 0)
    return np.union1d(waiting, scalars[silent])


def _mask(events: EventTable, rows: NDArray[np.int64], wanted: Any) -> NDArray[np.bool_]:
    """Which rows have a name for which ``wanted`` is true; each distinct name is asked once."""
    hit = np.zeros(len(events.names), np.bool_)
    for index in used_names(events, rows):
        hit[index] = wanted(events.names[index])
    return np.asarray(hit[events.name[rows]])


def _held(events: EventTable, outer: NDArray[np.int64], inner: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of the inner records begin within each outer one, on its thread."""
    counts = np.zeros(len(outer), np.int64)
    outer_keys, inner_keys = thread_keys(events, outer), thread_keys(events, inner)
    for key in np.unique(outer_keys):
        mine = np.flatnonzero(outer_keys == key)
        starts = events.start_ns[inner[inner_keys == key]]
        first = np.searchsorted(starts, events.start_ns[outer[mine]], side="left")
        counts[mine] = np.searchsorted(starts, events.end_ns[outer[mine]], side="left") - first
    return counts


def _outermost(events: EventTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows that lie in none of the others on their thread."""
    keys = thread_keys(events, rows)
    kept = np.ones(len(rows), np.bool_)
    for key in np.unique(keys):
        mine = np.flatnonzero(keys == key)
        reach = np.maximum.accumulate(events.end_ns[rows[mine]])
        kept[mine[1:]] = events.end_ns[rows[mine[1:]]] > reach[:-1]
    return rows[kept]


# ---- what they cost ---------------------------------------------------------------------------------------------


def _device_cost(events: EventTable, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Idle time of the device during each call, and after it until its next work or the next waiting call."""
    work = np.flatnonzero(events.is_device_work())
    busy = union(events.start_ns[work], events.end_ns[work])
    start, end = events.start_ns[rows], events.end_ns[rows]
    # The device's next piece of work after the return: work that begins later, whoever launched it.
    following = np.append(events.start_ns[work], np.iinfo(np.int64).max)
    begins = following[np.searchsorted(events.start_ns[work], end, side="left")]
    # Calls of several threads may overlap: the latest end so far bounds each.
    next_call = np.append(start[1:], np.iinfo(np.int64).max)
    until = np.minimum(begins, np.maximum(next_call, end))
    until = np.where(until == np.iinfo(np.int64).max, end, until)  # Nothing follows: nobody waited.
    idle = _idle(busy, start, end)
    return idle, np.minimum(_idle(busy, end, until), end - start - idle)


def _idle(busy: Intervals, start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    windows = np.column_stack((start, end))
    return np.asarray(end - start - total_within(busy, windows), np.int64)


# ---- where they are called from ---------------------------------------------------------------------------------


def _points(
    events: EventTable,
    rows: NDArray[np.int64],
    python: NDArray[np.int64],
    idle: NDArray[np.int64] | None,
    restart: NDArray[np.int64] | None,
) -> tuple[SynchronisationPoint, ...]:
    operators = Enclosing(events, np.flatnonzero(events.category == Category.CPU_OP))
    ranges = Enclosing(events, np.flatnonzero(events.category == Category.ANNOTATION))
    theirs = _mask(events, python, is_users_frame)
    frames = Enclosing(events, python[theirs])
    keys = thread_keys(events, rows)
    places: dict[tuple[str, tuple[str, ...], str | None, str | None, bool], list[int]] = defaultdict(list)
    for position, (row, key) in enumerate(zip(rows.tolist(), keys.tolist(), strict=True)):
        start, end = int(events.start_ns[row]), int(events.end_ns[row])

        def names(found: NDArray[np.int64], row: int = row) -> list[str]:
            return [events.names[events.name[one]] for one in found.tolist() if one != row]

        around = [name for name in names(operators.around(key, start, end)) if not _NO_CALLER.match(name)]
        inside = [name for name in names(ranges.around(key, start, end)) if not _STEP.match(name)]
        own = names(frames.around(key, start, end))
        others = [] if own else [names(frames.around(other, start, end)) for other in frames.threads]
        callers = next((found for found in others if found), [])
        frame = next(reversed(own or callers), None)
        place = (
            events.names[events.name[row]],
            tuple(around),
            inside[-1] if inside else None,
            frame,
            bool(callers),
        )
        places[place].append(position)

    def total(values: NDArray[np.int64] | None, mine: list[int]) -> int | None:
        return None if values is None else int(values[mine].sum())

    found = [
        SynchronisationPoint(
            *place,
            calls=len(mine),
            waited_ns=int(events.duration_ns[rows[mine]].sum()),
            idle_ns=total(idle, mine),
            restart_ns=total(restart, mine),
        )
        for place, mine in places.items()
    ]
    return tuple(sorted(found, key=lambda point: (-point.device_ns, -point.waited_ns, point.call)))
