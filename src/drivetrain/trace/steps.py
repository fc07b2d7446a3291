"""Steps of a trace: where each begins and ends on the host, and which stretch of device time is its own.

Steps come from ``ProfilerStep#n`` ranges on the host (never from the profiler's copy of them on the device, which
counts each step twice), else from ``Optimizer.step``, else from a sequence of work that repeats. A step's device
work is what was launched in it, found by correlation: on the device it may run long after the host went on.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.health import Finding
from drivetrain.trace.host_context import launch_rows
from drivetrain.trace.lookup import flags
from drivetrain.trace.table import Category, EventTable

__all__ = [
    "UNKNOWN_TIME",
    "StepMark",
    "Steps",
    "cpu_windows",
    "device_windows",
    "find_steps",
    "launch_times",
    "names_matching",
    "repeated_pattern",
    "step_of",
]

UNKNOWN_TIME: int = int(np.iinfo(np.int64).min)
"""Stands for a time that no record tells. No time of a trace is that early."""

Origin = Literal["profiler_step", "optimizer_step", "pattern", "none"]

_PROFILER_STEP = re.compile(r"ProfilerStep\s*#?\s*(\d{1,18})$")
"""No job counts so far that a number does not fit 64 bits: a longer one is damage."""
_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#")


@dataclass(frozen=True)
class StepMark:
    """One step on the host's clock."""

    number: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Steps:
    """All steps of one trace, in order of time."""

    marks: tuple[StepMark, ...]
    origin: Origin
    health: tuple[Finding, ...] = ()
    on_device: bool = False
    """Whether the marks are device time already (a pattern of kernels), not host time."""


def names_matching(events: EventTable, pattern: re.Pattern[str]) -> NDArray[np.int32]:
    """Indices into ``events.names`` of the names `pattern` matches at their start."""
    return np.array([i for i, name in enumerate(events.names) if pattern.match(name)], np.int32)


def rows_matching(
    events: EventTable, pattern: re.Pattern[str], categories: Sequence[Category]
) -> NDArray[np.intp]:
    """Rows whose name matches and whose category is one of those given."""
    names = names_matching(events, pattern)
    if len(names) == 0:
        return np.empty(0, np.intp)
    wanted = np.zeros(len(events.names), np.bool_)
    wanted[names] = True
    return np.flatnonzero(wanted[events.name] & flags(len(Category), categories)[events.category])


def find_steps(events: EventTable, *, infer: bool = True) -> Steps:
    """Steps of a trace; empty where nothing tells.

    Args:
        events: all events of the trace.
        infer: look beyond ``ProfilerStep`` ranges.
    """
    marks = _profiler_steps(events)
    if marks:
        return Steps(marks, "profiler_step", (_first_is_suspect(marks[0].number),))
    if not infer:
        return Steps((), "none")
    marks = _optimizer_steps(events)
    if marks:
        return Steps(marks, "optimizer_step", (_inferred(len(marks), "the ends of Optimizer.step"),))
    device = events.is_device_work()
    found = _pattern_steps(events, np.flatnonzero(device if device.any() else _top_level_work(events)))
    if found:
        health = (_inferred(len(found), "a sequence of work that repeats"),)
        return Steps(found, "pattern", health, on_device=bool(device.any()))
    return Steps((), "none")


def _first_is_suspect(number: int) -> Finding:
    return Finding(
        "first_step",
        "note",
        f"step {number} is the first recorded one: the profiler was starting and records at its beginning may be "
        "missing; means and the waterfall leave it out where there are others",
        1,
    )


def _inferred(count: int, how: str) -> Finding:
    return Finding(
        "steps_inferred",
        "note",
        f"no ProfilerStep ranges: {count} steps were inferred from {how}; they are numbered from 0",
        count,
    )


def _profiler_steps(events: EventTable) -> tuple[StepMark, ...]:
    rows = rows_matching(events, _PROFILER_STEP, (Category.ANNOTATION,))
    if len(rows) == 0:  # Traces of 2021 record the range as an operator.
        rows = rows_matching(events, _PROFILER_STEP, (Category.CPU_OP,))
    found: list[StepMark] = []
    for row in rows.tolist():
        match = _PROFILER_STEP.match(events.names[events.name[row]])
        assert match is not None
        start = int(events.start_ns[row])
        mark = StepMark(int(match[1]), start, start + int(events.duration_ns[row]))
        # The same step seen twice, by two threads: the range that begins first holds the other.
        twice = any(known.number == mark.number and mark.start_ns < known.end_ns for known in found)
        if not twice:
            found.append(mark)
    return tuple(found)


def _optimizer_steps(events: EventTable) -> tuple[StepMark, ...]:
    """A step lasts from the end of one update to the end of the next; what follows the last is no whole step."""
    rows = rows_matching(events, _OPTIMIZER_STEP, (Category.ANNOTATION, Category.CPU_OP))
    if len(rows) < 2:
        return ()
    # Wrapped optimizers record one range inside the other, under two names: one of them counts.
    name = events.name[rows[0]]
    ends = (events.start_ns + events.duration_ns)[rows[events.name[rows] == name]]
    host = ~events.is_device_work() & (events.category != np.uint8(Category.OTHER))
    starts = np.concatenate(([int(events.start_ns[host].min())], ends[:-1]))
    return tuple(
        StepMark(number, int(start), int(end))
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
        if end > start
    )


def _top_level_work(events: EventTable) -> NDArray[np.bool_]:
    """Operators on the busiest thread of the host that are inside no other operator."""
    operators = np.flatnonzero(events.category == np.uint8(Category.CPU_OP))
    top = np.zeros(len(events), np.bool_)
    if len(operators) == 0:
        return top
    thread = events.thread[operators]
    mine = operators[thread == np.bincount(thread).argmax()]
    reach = np.maximum.accumulate(events.end_ns[mine])
    outer = np.ones(len(mine), np.bool_)
    outer[1:] = events.start_ns[mine[1:]] >= reach[:-1]
    top[mine[outer]] = True
    return top


def _pattern_steps(events: EventTable, rows: NDArray[np.intp]) -> tuple[StepMark, ...]:
    if len(rows) == 0:
        return ()
    stream = events.stream[rows]
    rows = rows[stream == np.bincount(stream + 1).argmax() - 1]
    starts = events.start_ns[rows]
    reach = np.maximum.accumulate(events.end_ns[rows])
    period = repeated_pattern(events.name[rows])
    if period is None:
        return ()
    gaps = np.zeros(len(rows), np.int64)
    gaps[1:] = np.maximum(starts[1:] - reach[:-1], 0)
    # The place in the pattern before which the device pauses longest is where a step begins.
    offset = max(range(period), key=lambda place: int(gaps[max(place, 1) :: period].sum()))
    firsts = np.arange(offset, len(rows), period)
    bounds = [*starts[firsts].tolist(), int(reach[-1])]
    if len(rows) - firsts[-1] < period:  # What follows the last whole repetition is part of a step only.
        bounds.pop()
    return tuple(StepMark(i, bounds[i], bounds[i + 1]) for i in range(len(bounds) - 1))


def repeated_pattern(sequence: NDArray[np.int32]) -> int | None:
    """Period of a sequence of names that repeats at least twice, or None.

    Periods are proposed by the distances between occurrences of the same name. One is taken if 98% of the sequence
    equals itself shifted by it; of several the shortest that is as good as the best (within 0.2%), since twice a
    period is a period too. Layers of a model repeat within a step, but the step's other work spoils that match.
    """
    length = len(sequence)
    if length < 4:
        return None
    order = np.argsort(sequence, kind="stable")
    same = sequence[order][1:] == sequence[order][:-1]
    distances = (order[1:] - order[:-1])[same]
    distances = distances[(distances >= 2) & (distances <= length // 2)]
    if len(distances) == 0:
        return None
    counts = np.bincount(distances)
    # Weighted by length: a long distance recurs less often than the short ones inside it.
    candidates = np.argsort(counts * np.arange(len(counts)), kind="stable")[::-1][:40]
    quality = {
        int(period): float(np.mean(sequence[period:] == sequence[:-period]))
        for period in candidates
        if counts[period]
    }
    best = max(quality.values())
    if best < 0.98:
        return None
    return min(period for period, value in quality.items() if value >= max(0.98, best - 0.002))


def launch_times(events: EventTable, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """Start of the host call that launched each device record; `UNKNOWN_TIME` where no call is known.

    Args:
        events: all events.
        rows: shape (k,), rows of device work.
    """
    calls = launch_rows(events, rows)
    return np.where(calls >= 0, events.start_ns[calls], UNKNOWN_TIME)


def step_of(marks: Sequence[StepMark], times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Position of the step that each time on the host falls into, or of the last one begun; -1: before all."""
    starts = np.array([mark.start_ns for mark in marks], np.int64)
    return np.asarray(np.searchsorted(starts, times, side="right") - 1, np.int64)


def cpu_windows(steps: Steps) -> NDArray[np.int64]:
    """Host start and end of each step, shape (m, 2)."""
    return np.array([[mark.start_ns, mark.end_ns] for mark in steps.marks], np.int64).reshape(-1, 2)


def device_windows(events: EventTable, steps: Steps) -> NDArray[np.int64]:
    """Device time of each step, shape (m, 2): windows that follow each other without a gap.

    A step's window begins with the first device record launched in it and ends where the next step's begins. The
    last one ends when its work and its host range are both over. A step that launched nothing begins with its host
    range. Records without a known launch belong to the step in whose host range they start.
    """
    windows = cpu_windows(steps)
    if steps.on_device or len(windows) == 0:
        return windows
    rows = np.flatnonzero(events.is_device_work())
    starts, ends = events.start_ns[rows], events.end_ns[rows]
    launched = launch_times(events, rows)
    times = np.where(launched != UNKNOWN_TIME, launched, starts)
    step = step_of(steps.marks, times)
    inside = (step >= 0) & (times < windows[np.maximum(step, 0), 1])
    first = np.full(len(windows), np.iinfo(np.int64).max)
    np.minimum.at(first, step[inside], starts[inside])
    # A device clock may run a little behind the host's: no work begins before its step does.
    launched_any = first < np.iinfo(np.int64).max
    begins = np.where(launched_any, np.maximum(first, windows[:, 0]), windows[:, 0])
    begins = np.maximum.accumulate(begins)
    last = inside & (step == len(windows) - 1)
    end = max(int(ends[last].max()) if last.any() else 0, int(windows[-1, 1]), int(begins[-1]))
    return np.column_stack((begins, np.append(begins[1:], end)))
