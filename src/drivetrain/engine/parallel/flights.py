"""Each collective as a flight: when this rank handed it over, when it was complete, how long the host stood waiting.

No profiler is needed for it, so every step of a run has it. A flight costs some microseconds and a few hundred bytes,
which :meth:`Flights.take` frees at the end of the step.

Gloo runs a collective on a thread of its own and tells its future there, so that completion is seen when it happens and
not when somebody asks. A work without a future (gloo's own reduce-scatter, which copies in ``wait()``) is
complete, for all that is known, when ``wait()`` returns: such a flight says so (``exact`` is False). Collectives of
tensors on CUDA run on streams, of which the host's clock says nothing: nobody records flights there.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from drivetrain.engine.parallel.wrapped_work import WrappedWork
from drivetrain.measure.overlap import FlightRecord

__all__ = ["GLOO_LANES", "MOST_FLIGHTS", "Flight", "Flights", "flown", "flown_or_watched", "watched"]

GLOO_LANES = 2
"""Threads that a gloo group runs its collectives on (two for each network device, and there is one): so many of one
group are under way at once, the others queue."""
MOST_FLIGHTS = 50_000
"""Kept at once. Later ones are counted and not kept, so that memory is bounded whatever a step does."""


class Flight:
    """One collective of this rank. Times are ``time.perf_counter_ns()``; any thread may set them.

    Attributes:
        group: dimension of the mesh, or ``world``.
        kind: ``all_reduce`` ...
        bytes: payload, as :class:`~drivetrain.engine.parallel.traffic.Traffic` counts it.
        queue: name of the process group, whose collectives are run in the order in which they are handed over.
        sequence: its number in the queue, the same on all ranks of the group.
        issued_ns: just before it was handed over.
        completed_ns: None while it is under way.
        exact: whether `completed_ns` is when the library said so; False: when a wait for it had returned.
        blocked: start and end of each time for which the training thread stood waiting for it.
    """

    __slots__ = (
        "_host",
        "blocked",
        "bytes",
        "completed_ns",
        "exact",
        "group",
        "issued_ns",
        "kind",
        "queue",
        "sequence",
    )

    def __init__(self, group: str, kind: str, bytes: int, queue: str, sequence: int, host: int) -> None:
        self.group = group
        self.kind = kind
        self.bytes = bytes
        self.queue = queue
        self.sequence = sequence
        self.completed_ns: int | None = None
        self.exact = True
        self.blocked: list[tuple[int, int]] = []
        self._host = host
        self.issued_ns = time.perf_counter_ns()

    def landed(self, _future: object = None) -> None:
        """It is complete, now: who did it says so."""
        if self.completed_ns is None:
            self.completed_ns = time.perf_counter_ns()
            self.exact = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever waits for it. Counts as blocked where the training thread waits; another thread that waits
        keeps nobody from computing."""
        before = time.perf_counter_ns()
        yield
        after = time.perf_counter_ns()
        if self.completed_ns is None:
            self.completed_ns = after
            self.exact = False
        if threading.get_ident() == self._host:
            self.blocked.append((before, after))

    def record(self) -> FlightRecord:
        """It as plain data, as it stands."""
        return FlightRecord(
            group=self.group,
            kind=self.kind,
            bytes=self.bytes,
            queue=self.queue,
            sequence=self.sequence,
            issued_ns=self.issued_ns,
            completed_ns=self.completed_ns,
            exact=self.exact,
            blocked=tuple(self.blocked),
        )


class Flights:
    """The flights of the step that is running.

    Nothing is recorded before the first :meth:`begin_step`, so that who never takes them keeps none. Flights may begin
    on any thread; the thread that calls :meth:`begin_step` is the one that trains.
    """

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()
        self._sequences: dict[str, Iterator[int]] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._host: int | None = None
        self._backward_began: int | None = None
        self._backward: tuple[int, int] | None = None
        self.dropped = 0

    @property
    def members(self) -> Mapping[str, tuple[int, ...]]:
        """Ranks of each process group that has been flown in, by its name."""
        return self._members

    def begin(
        self, group: str, kind: str, bytes: int, process_group: dist.ProcessGroup | None
    ) -> Flight | None:
        """A collective is about to be handed over; None where nothing is recorded."""
        if self._host is None:
            return None
        assert process_group is not None, "this rank is not in the group"
        queue = process_group.group_name
        sequence = self._sequences.get(queue)
        if sequence is None:
            self._members[queue] = tuple(dist.get_process_group_ranks(process_group))
            # setdefault: two threads may be the first.
            sequence = self._sequences.setdefault(queue, itertools.count())
        number = next(sequence)
        if len(self._flights) >= MOST_FLIGHTS:
            self.dropped += 1
            return None
        flight = Flight(group, kind, bytes, queue, number, self._host)
        self._flights.append(flight)
        return flight

    def begin_step(self) -> None:
        """A step begins: what was complete before it is forgotten, what is under way belongs to it."""
        self._host = threading.get_ident()
        self.take()
        self.take_dropped()

    def begin_backward(self) -> None:
        """From here on gradients become ready to be reduced."""
        self._backward_began = time.perf_counter_ns()

    def end_backward(self) -> None:
        """All of them are ready."""
        if self._backward_began is not None:
            self._backward = self._backward_began, time.perf_counter_ns()

    def take(self) -> tuple[list[Flight], tuple[int, int] | None]:
        """The flights since the last call and those that were under way then; and start and end of backward.

        Those that are still under way are in the next answer, too: each step has its part of them.
        """
        taken: list[Flight] = []
        # One by one, in place: another thread may be appending.
        for _ in range(len(self._flights)):
            flight = self._flights.popleft()
            taken.append(flight)
            if flight.completed_ns is None:
                self._flights.append(flight)
        backward, self._backward, self._backward_began = self._backward, None, None
        return taken, backward

    def take_dropped(self) -> int:
        """Flights that were not kept since the last call, because a step had too many."""
        dropped, self.dropped = self.dropped, 0
        return dropped


def watched(work: dist.Work, flight: Flight | None) -> dist.Work:
    """``work``, whose completion and waits are noted in ``flight``; itself where nothing is recorded."""
    if flight is None:
        return work
    _told(work, flight)
    return WrappedWork(work, flight.waiting)


def _told(work: dist.Work, flight: Flight) -> None:
    """Have the library tell when ``work`` is complete."""
    try:
        future = work.get_future()
    except RuntimeError:
        # This kind of work has none: `waiting` notes its completion, and that it is not exact.
        return
    future.add_done_callback(flight.landed)


def flown(launch: Callable[[bool], dist.Work | None], flight: Flight | None) -> None:
    """A collective from its start to its end.

    Args:
        launch: begins it; with True asynchronously, and then returns its work.
    """
    if flight is None:
        launch(False)
        return
    # The thread does nothing else from the start on.
    with flight.waiting():
        work = launch(True)
        assert work is not None, "this rank is not in the group"
        _told(work, flight)
        work.wait()


def flown_or_watched(
    launch: Callable[[bool], dist.Work | None], flight: Flight | None, *, async_op: bool
) -> dist.Work | None:
    """A collective that somebody else decides to wait for: its work with ``async_op``, otherwise None at its end."""
    if not async_op:
        flown(launch, flight)
        return None
    work = launch(True)
    return None if work is None else watched(work, flight)
