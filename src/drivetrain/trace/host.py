"""What the host was doing: the compute of a run without a device, and why a device had nothing to do.

Two uses of the same records. In the *host view* (no device records) operators are the compute. In the *device view*
they only explain why the device was idle. Causes come from records whose names the table of causes knows
(``names/<version>/causes.toml``): those of our own loop (``drivetrain/fetch``) and those that trainers and libraries
record by themselves.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from drivetrain.measure.intervals import Intervals, union
from drivetrain.trace.classify import CLASSES, Classification
from drivetrain.trace.host_context import thread_keys, used_names
from drivetrain.trace.lookup import contained, distinct, flags
from drivetrain.trace.name_table import CAUSES, NameTable
from drivetrain.trace.table import Category, EventTable

__all__ = ["HostRecords", "compute_rows", "host_compute"]


@dataclass(frozen=True, eq=False)
class HostRecords:
    """Host records of one trace, sorted out by what they tell.

    All intervals are in absolute ns, of the threads that run the training code (`main_threads`) only: a loader's
    own threads may well be busy while training waits for none of them.
    """

    events: EventTable
    classification: Classification
    table: NameTable

    @cached_property
    def is_host(self) -> NDArray[np.bool_]:
        """Rows of operators, runtime calls, ranges and Python functions."""
        wanted = (Category.CPU_OP, Category.RUNTIME, Category.ANNOTATION, Category.PYTHON)
        return flags(len(Category), wanted)[self.events.category]

    @property
    def complete(self) -> bool:
        """Whether there are records of the host at all that could tell a cause."""
        categories = self.events.category
        return bool(((categories == Category.CPU_OP) | (categories == Category.RUNTIME)).any())

    @cached_property
    def main_threads(self) -> NDArray[np.bool_]:
        """Mask of host rows on threads that run the training code.

        Those that record steps, optimizer updates, our loop's phases or backward nodes, or launch kernels (a thread
        that pins memory or watches events only calls the runtime). Where none does: every thread that runs operators
        but carries out no collective.
        """
        events = self.events
        keys = thread_keys(events)
        signs = self.named(
            r"ProfilerStep|Optimizer\.step#|drivetrain/|autograd::engine::evaluate_function|enumerate\("
        )
        calls = np.flatnonzero((events.category == np.uint8(Category.RUNTIME)) & (events.correlation >= 0))
        kernels = events.correlation[events.category == np.uint8(Category.KERNEL)]
        launches = calls[contained(events.correlation[calls], kernels)]
        threads = distinct(np.concatenate((keys[signs[events.name] & self.is_host], keys[launches])))
        if len(threads) == 0:
            communicates = keys[self.named(r"gloo:")[events.name] & self.is_host]
            operators = distinct(keys[events.category == np.uint8(Category.CPU_OP)])
            threads = operators[~contained(operators, communicates)]
        return contained(keys, threads) & self.is_host

    def named(self, pattern: str) -> NDArray[np.bool_]:
        """Mask over names that match at their start."""
        compiled = re.compile(pattern)
        return np.array([compiled.match(name) is not None for name in self.events.names], np.bool_)

    def cover(self, mask: NDArray[np.bool_]) -> Intervals:
        """Union of the records of a mask over rows."""
        starts = self.events.start_ns[mask]
        return union(starts, starts + self.events.duration_ns[mask])

    @cached_property
    def cause_of_name(self) -> NDArray[np.int8]:
        """Position in `CAUSES` of each name of a host record, -1: none. Shape (len(names),)."""
        of_name = np.full(len(self.events.names), -1, np.int8)
        told = self.is_host | (self.events.category == np.uint8(Category.OVERHEAD))
        for index in used_names(self.events, told):
            label = self.table.label("cause", self.events.names[index])
            if label in CAUSES:
                of_name[index] = CAUSES.index(label)
        return of_name

    @cached_property
    def _cause_rows(self) -> NDArray[np.int8]:
        """Position in `CAUSES` of each row, -1: none. Overhead of the profiler counts on any thread."""
        rows = np.where(self.main_threads, self.cause_of_name[self.events.name], np.int8(-1))
        profiler = CAUSES.index("maintenance.profiler")
        overhead = self.events.category == np.uint8(Category.OVERHEAD)
        is_profiler = overhead & (self.cause_of_name[self.events.name] == profiler)
        return np.where(is_profiler, np.int8(profiler), rows)

    def tells(self, name: str) -> bool:
        """Whether any record says that a cause held: without one, its time is unknown and not zero."""
        return bool((self._cause_rows == CAUSES.index(name)).any())

    def causes(self) -> Mapping[str, Intervals]:
        """Class of the account → when its cause held, in the order in which they take time.

        ``host.launch``: an operator or a call into the runtime was running, that is, work was on its way.
        ``host.python``: neither, but a named part of the training code (or a Python function) was running. Steps
        themselves are no cause: in a step outside any other record the device is ``idle``.
        """
        if not self.is_host.any():
            return {}
        events, rows = self.events, self._cause_rows
        found = {name: self.cover(rows == i) for i, name in enumerate(CAUSES)}
        category = events.category
        busy = (category == np.uint8(Category.CPU_OP)) | (category == np.uint8(Category.RUNTIME))
        found["host.launch"] = self.cover(
            self.main_threads & busy & ~self.named(r"ProfilerStep")[events.name]
        )
        ranges = (category == np.uint8(Category.ANNOTATION)) | (category == np.uint8(Category.PYTHON))
        not_code = self.named(r"ProfilerStep|gloo:|nccl:")[events.name]
        found["host.python"] = self.cover(self.main_threads & ranges & ~not_code)
        return found

    def h2d(self) -> Intervals:
        """Ranges around the copy of a batch to where the model is."""
        copies = np.zeros(len(self.events.names), np.bool_)
        for index in used_names(self.events, self.is_host):
            copies[index] = self.table.label("cause", self.events.names[index]) == "copy.h2d"
        return self.cover(copies[self.events.name] & self.main_threads)

    def set_apart(self) -> Intervals:
        """Loading and maintenance on the main threads: operators inside are theirs, not the model's."""
        apart = [i for i, name in enumerate(CAUSES) if name.split(".")[0] in ("data", "maintenance")]
        return self.cover(np.isin(self._cause_rows, apart) & self.main_threads)


def host_compute(records: HostRecords) -> dict[str, Intervals]:
    """Compute of the host view: class of the account → when its operators ran.

    Counted are the operators that do the work themselves, and calls of compiled graphs, on the main threads; which
    they are and what they do the classification says. Operators inside loading or maintenance belong to those.
    """
    events, classes = records.events, records.classification
    rows = compute_rows(records)
    kind, again = classes.kind[rows], classes.recompute[rows]
    starts = events.start_ns[rows]
    ends = starts + events.duration_ns[rows]
    sets = {"recompute": union(starts[again], ends[again])}
    for index in distinct(kind).tolist():
        mine = (kind == index) & ~again
        sets[CLASSES[index]] = union(starts[mine], ends[mine])
    return sets


def compute_rows(records: HostRecords) -> NDArray[np.int64]:
    """Rows of the operators that are the compute of the host view, ascending."""
    rows = np.flatnonzero(records.classification.is_compute() & records.main_threads)
    return rows[~_inside(records.events.start_ns[rows], records.set_apart())]


def _inside(times: NDArray[np.int64], intervals: Intervals) -> NDArray[np.bool_]:
    """Which times lie in the interval set."""
    if len(intervals) == 0:
        return np.zeros(len(times), np.bool_)
    place = np.searchsorted(intervals[:, 0], times, side="right") - 1
    return np.asarray((place >= 0) & (times < intervals[np.maximum(place, 0), 1]))
