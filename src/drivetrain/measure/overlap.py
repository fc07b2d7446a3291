"""What collectives cost a step, from when they were handed over, were complete, and were waited for.

One rank knows how long its collectives were under way and for how long its host stood waiting for them. What is in the
first and not in the second was *hidden*: the host went on. Only the ranks of a group together know how much of a
collective was waiting for the last of them (:func:`match`).

=========== =======================================================================================================
wire        union of the times in which a collective was under way: from its turn in the queue to its completion
exposed     the part of it in which the training thread stood waiting for one, whatever for: its turn, the slowest
            rank, the transfer. What the thread needs to wake up afterwards is not in it
hidden      wire without exposed
idle        nothing of a group under way, and the host not waiting: time in which something could have travelled; of
            that, what lies in the backward pass that makes gradients ready
=========== =======================================================================================================

So wire is hidden and exposed together. Between two operators the host computes nothing, but it does not wait for a
collective either: a trace's account, which calls communication exposed where no operator runs, finds as much more
exposed as there are gaps between operators.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from drivetrain.measure.intervals import EMPTY, Intervals, clip, intersect, subtract, total, union, union_of

__all__ = [
    "FlightRecord",
    "GroupOverlap",
    "KindOverlap",
    "Line",
    "StepOverlap",
    "flights_of",
    "overlap_of",
    "rows_of",
    "turns",
]


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """One collective of one rank; times in ns of that rank's clock.

    Attributes:
        group: dimension of the mesh, or ``world``.
        kind: ``all_reduce`` ...
        bytes: payload that the rank contributes.
        queue: name of the process group.
        sequence: its number in the queue, the same on every rank of the group.
        issued_ns: when it was handed over.
        completed_ns: None: not known, or not complete yet.
        exact: whether the library told of the completion; False: a wait for it had returned by then.
        blocked: start and end of each wait of the training thread for it.
    """

    group: str
    kind: str
    bytes: int
    queue: str
    sequence: int
    issued_ns: int
    completed_ns: int | None
    exact: bool = True
    blocked: tuple[tuple[int, int], ...] = ()


def rows_of(flights: Sequence[FlightRecord]) -> list[list[Any]]:
    """Flights as plain rows, in the order of the fields."""
    return [
        [
            *(flight.group, flight.kind, flight.bytes, flight.queue, flight.sequence),
            *(flight.issued_ns, flight.completed_ns, flight.exact, [list(wait) for wait in flight.blocked]),
        ]
        for flight in flights
    ]


def flights_of(rows: Iterable[Sequence[Any]]) -> list[FlightRecord]:
    """The flights that :func:`rows_of` made rows of; ValueError where they are no such rows."""
    found = []
    for row in rows:
        if not _is_row(row):
            raise ValueError(f"not a row of a collective: {str(row)[:80]}")
        group, kind, size, queue, sequence, issued, completed, exact, waits = row
        blocked = tuple((start, end) for start, end in waits)
        found.append(FlightRecord(group, kind, size, queue, sequence, issued, completed, exact, blocked))
    return found


def _is_row(row: object) -> bool:
    if not isinstance(row, list) or len(row) != len(_ROW):
        return False
    fits = all(isinstance(value, kinds) for value, kinds in zip(row, _ROW, strict=True))
    return fits and all(
        isinstance(wait, list) and len(wait) == 2 and all(isinstance(time, int) for time in wait)
        for wait in row[-1]
    )


_ROW: tuple[type | tuple[type, ...], ...] = (
    *(str, str, int, str, int),
    *(int, (int, type(None)), bool, list),
)
"""Types of a row."""


@dataclass(frozen=True, slots=True)
class Line:
    """Sums of collectives' sizes and times, from which a straight line follows; lines add up.

    Attributes:
        n, x, y, xx, xy: how many, sum of bytes, of ns under way, of bytes squared, of bytes times ns.
    """

    n: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def __add__(self, other: "Line") -> "Line":
        return Line(
            self.n + other.n, self.x + other.x, self.y + other.y, self.xx + other.xx, self.xy + other.xy
        )

    def fit(self) -> tuple[float, float] | None:
        """Nanoseconds that a collective takes whatever its size, and ns for each byte of payload (least squares); None
        where sizes do not differ, or the line makes no sense (a cost below zero)."""
        spread = self.n * self.xx - self.x * self.x
        if self.n < 2 or spread <= 1e-9 * self.n * self.xx:
            return None
        slope = (self.n * self.xy - self.x * self.y) / spread
        start = (self.y - slope * self.x) / self.n
        return (start, slope) if slope > 0 and start > 0 else None


@dataclass(frozen=True, slots=True)
class KindOverlap:
    """Collectives of one kind of one group; ns as in the table above."""

    calls: int = 0
    bytes: int = 0
    wire_ns: int = 0
    exposed_ns: int = 0
    line: Line = Line()

    def __add__(self, other: "KindOverlap") -> "KindOverlap":
        return KindOverlap(
            self.calls + other.calls,
            self.bytes + other.bytes,
            self.wire_ns + other.wire_ns,
            self.exposed_ns + other.exposed_ns,
            self.line + other.line,
        )


@dataclass(frozen=True, slots=True)
class GroupOverlap:
    """Collectives of one group in one step, or sums over steps; ns as in the table above. Kinds may overlap."""

    wire_ns: int = 0
    hidden_ns: int = 0
    exposed_ns: int = 0
    idle_ns: int = 0
    backward_idle_ns: int = 0
    kinds: Mapping[str, KindOverlap] = field(default_factory=dict)

    def __add__(self, other: "GroupOverlap") -> "GroupOverlap":
        return GroupOverlap(
            self.wire_ns + other.wire_ns,
            self.hidden_ns + other.hidden_ns,
            self.exposed_ns + other.exposed_ns,
            self.idle_ns + other.idle_ns,
            self.backward_idle_ns + other.backward_idle_ns,
            _added(self.kinds, other.kinds, KindOverlap()),
        )

    @property
    def calls(self) -> int:
        """Of all kinds."""
        return sum(kind.calls for kind in self.kinds.values())

    @property
    def bytes(self) -> int:
        """Payload of all kinds."""
        return sum(kind.bytes for kind in self.kinds.values())


@dataclass(frozen=True, slots=True)
class StepOverlap:
    """All collectives of a step of one rank, or sums over ``steps`` of them.

    Attributes:
        window_ns: length of the step.
        backward_ns: length of the backward pass that makes gradients ready (of the last micro-batch); 0: not known.
        wire_ns, hidden_ns, exposed_ns: over all groups together; groups may overlap, so theirs may sum to more.
        inexact: collectives whose completion was seen by nobody but a wait for them.
        groups: by name.
    """

    steps: int = 0
    window_ns: int = 0
    backward_ns: int = 0
    wire_ns: int = 0
    hidden_ns: int = 0
    exposed_ns: int = 0
    inexact: int = 0
    groups: Mapping[str, GroupOverlap] = field(default_factory=dict)

    def __add__(self, other: "StepOverlap") -> "StepOverlap":
        return StepOverlap(
            self.steps + other.steps,
            self.window_ns + other.window_ns,
            self.backward_ns + other.backward_ns,
            self.wire_ns + other.wire_ns,
            self.hidden_ns + other.hidden_ns,
            self.exposed_ns + other.exposed_ns,
            self.inexact + other.inexact,
            _added(self.groups, other.groups, GroupOverlap()),
        )

    @property
    def overlap_frac(self) -> float | None:
        """Hidden over wire time; None where nothing was under way."""
        return self.hidden_ns / self.wire_ns if self.wire_ns else None

    @property
    def exposed_frac(self) -> float | None:
        """Exposed over the step's time; None of no time."""
        return self.exposed_ns / self.window_ns if self.window_ns else None


_Sums = TypeVar("_Sums", KindOverlap, GroupOverlap)


def _added(left: Mapping[str, _Sums], right: Mapping[str, _Sums], nothing: _Sums) -> dict[str, _Sums]:
    return {
        name: left.get(name, nothing) + right.get(name, nothing) for name in dict.fromkeys((*left, *right))
    }


def turns(flights: Sequence[FlightRecord], end_ns: int, lanes: int) -> list[tuple[int, int]]:
    """Start and end of each collective's own time under way, without what it spent in its queue.

    A queue hands its collectives in order to ``lanes`` workers; each takes the next when it is done with its last one.

    Args:
        flights: in any order; the answer is in the same.
        end_ns: where those end that are not complete.
        lanes: collectives of one queue that are under way at once.
    """
    assert lanes >= 1
    free: dict[str, list[int]] = {}
    found: list[tuple[int, int]] = [(0, 0)] * len(flights)
    for index in sorted(range(len(flights)), key=lambda index: flights[index].sequence):
        flight = flights[index]
        workers = free.setdefault(flight.queue, [])
        begins = flight.issued_ns
        if len(workers) == lanes:
            begins = max(begins, heapq.heappop(workers))
        ends = flight.completed_ns if flight.completed_ns is not None else end_ns
        found[index] = begins, max(begins, ends)
        heapq.heappush(workers, found[index][1])
    return found


def overlap_of(
    flights: Sequence[FlightRecord],
    window: tuple[int, int],
    *,
    lanes: int,
    backward: tuple[int, int] | None = None,
) -> StepOverlap:
    """The collectives of one step, with the part of each that lies in it.

    Args:
        flights: all that were under way in the step, those included that began before or end after it.
        window: start and end of the step, ns.
        lanes: as for :func:`turns`.
        backward: start and end of the backward pass that makes gradients ready; None: not known.
    """
    start, end = window
    spans = turns(flights, end, lanes)
    waits = _union((wait for flight in flights for wait in flight.blocked), window)
    passed = EMPTY if backward is None else _union([backward], window)
    by_group: dict[str, dict[str, list[int]]] = {}
    for index, flight in enumerate(flights):
        by_group.setdefault(flight.group, {}).setdefault(flight.kind, []).append(index)
    wires: list[Intervals] = []
    groups: dict[str, GroupOverlap] = {}
    for name, by_kind in by_group.items():
        members = [index for indices in by_kind.values() for index in indices]
        wire = _union((spans[index] for index in members), window)
        free = subtract(_union([window], window), union_of((wire, waits)))
        groups[name] = GroupOverlap(
            wire_ns=total(wire),
            hidden_ns=total(subtract(wire, waits)),
            exposed_ns=total(intersect(wire, _waits_for(flights, members, window))),
            idle_ns=total(free),
            backward_idle_ns=total(intersect(free, passed)),
            kinds={kind: _kind_overlap(flights, spans, indices, window) for kind, indices in by_kind.items()},
        )
        wires.append(wire)
    everything = union_of(wires)
    return StepOverlap(
        steps=1,
        window_ns=end - start,
        backward_ns=total(passed),
        wire_ns=total(everything),
        hidden_ns=total(subtract(everything, waits)),
        exposed_ns=total(intersect(everything, waits)),
        inexact=sum(not flight.exact for flight in flights),
        groups=groups,
    )


def _kind_overlap(
    flights: Sequence[FlightRecord],
    spans: Sequence[tuple[int, int]],
    members: Sequence[int],
    window: tuple[int, int],
) -> KindOverlap:
    start, end = window
    own = [flights[index] for index in members if start <= flights[index].issued_ns < end]
    line = Line()
    for index in members:
        begins, ends = spans[index]
        if start <= begins and ends <= end and flights[index].completed_ns is not None:
            x, y = float(flights[index].bytes), float(ends - begins)
            line += Line(1, x, y, x * x, x * y)
    wire = _union((spans[index] for index in members), window)
    return KindOverlap(
        calls=len(own),
        bytes=sum(flight.bytes for flight in own),
        wire_ns=total(wire),
        exposed_ns=total(intersect(wire, _waits_for(flights, members, window))),
        line=line,
    )


def _waits_for(flights: Sequence[FlightRecord], members: Sequence[int], window: tuple[int, int]) -> Intervals:
    return _union((wait for index in members for wait in flights[index].blocked), window)


def _union(pairs: Iterable[tuple[int, int]], window: tuple[int, int]) -> Intervals:
    array = np.array(list(pairs), np.int64).reshape(-1, 2)
    return clip(union(array[:, 0], array[:, 1]), *window)
