"""Streams and events: what runs beside the computation, and in which order, said alike for a CPU and for CUDA.

A stream runs what it is given one after the other. An event is a point in a stream's work: another stream, or the
host, waits for it. Code that orders work by them is the same everywhere::

    compute, wire = current_stream(device), open_stream(device, "wire")
    product = part @ weight
    wire.wait(compute.record())          # not before the product is finished
    arrived = wire.run(lambda: send(product), tensors=(product,))
    ...                                  # compute something else
    compute.wait(arrived)                # not before it has arrived

On a CPU a stream is a thread (:class:`HostStream`), and the current stream is the thread that asks. On CUDA both are
CUDA's (:mod:`drivetrain.engine.parallel.streams_cuda`).

**Errors.** Work that raises ends its stream: what was given to it after is not run any more, and whoever waits for an
event of it from then on, asks it to run something, or closes it, gets the error; so does a stream that waits for such
an event. Nobody waits for ever. Who fails otherwise has streams end what they were given before what they use is taken
down: :func:`let_streams_end`.

**Idle time.** Each stream counts for how long it worked, waited for others' events, and had nothing to do:
:meth:`Stream.take_usage`. A communication stream that is idle while the computation's is not was given its work late or
in too few pieces; a current stream that is blocked waited for communication that did not hide.
"""

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from drivetrain.engine.one_core import OneCoreThread

__all__ = [
    "CallerStream",
    "Event",
    "HostStream",
    "Stream",
    "Usage",
    "current_stream",
    "let_streams_end",
    "open_stream",
]

Work = Callable[[], object]
_Doing = Literal["busy", "blocked", "idle"]
_LEAVE_S = 2.0
"""For which an interpreter that ends waits for a stream that is still at work. Threads that are left are daemons."""
_LOOK_S = 0.01


@dataclass(frozen=True)
class Usage:
    """What a stream did with its time since it was last asked, or was made. Seconds; the three add up to the wall time.

    Attributes:
        runs: pieces of work that ended.
        busy_s: at work. Of a caller's own stream: everything but waiting.
        blocked_s: waiting for events of other streams, with work behind them; None where it cannot be told from being
            idle (CUDA).
        idle_s: with nothing to do.
    """

    runs: int
    busy_s: float
    blocked_s: float | None
    idle_s: float

    @property
    def wall_s(self) -> float:
        """The time that is accounted for."""
        return self.busy_s + (self.blocked_s or 0.0) + self.idle_s


class Event(Protocol):
    """A point in a stream's work: everything that was given to the stream before it."""

    def wait(self) -> None:
        """Block the host until it is reached.

        Raises:
            BaseException: what the stream's work raised.
        """

    def is_complete(self) -> bool:
        """Whether it is reached, or never will be because of an error. Never waits."""


class Stream(Protocol):
    """Work in order, beside that of other streams. Given by one thread at a time, which decides the order.

    Attributes:
        name: what it is for, in errors and in figures.
    """

    @property
    def name(self) -> str: ...

    def run(self, work: Work, tensors: Sequence[Tensor] = ()) -> Event:
        """Do ``work`` after everything that the stream was given before; returns the end of it.

        On CUDA ``work`` is called at once and what it launches is in order; on a CPU it is called when its turn comes,
        without gradients being recorded. Its result is dropped: it leaves what it makes in tensors.

        Args:
            tensors: made on other streams, which ``work`` reads or writes. Their memory is not given to others before
                it has ended, even if the caller forgets them.
        """

    def record(self) -> Event:
        """The end of everything that the stream was given so far."""

    def wait(self, event: Event) -> None:
        """What the stream is given from now on begins after ``event``."""

    def take_usage(self) -> Usage | None:
        """What it did since the last call; None where nobody counts."""

    def close(self) -> None:
        """Return when all its work has ended.

        Raises:
            BaseException: what its work raised, if nobody was told yet.
        """


def current_stream(device: torch.device) -> Stream:
    """The stream that the caller's own operations on ``device`` run in. An object of its own at each call: keep it,
    it counts how long it waited."""
    if device.type == "cuda":
        from drivetrain.engine.parallel.streams_cuda import CudaStream

        return CudaStream.current(device)
    return CallerStream()


def open_stream(device: torch.device, name: str, *, high_priority: bool = False) -> Stream:
    """A new stream beside the current one. :meth:`Stream.close` it, or use it in a ``with``; one that is forgotten ends
    by itself when its work has.

    Args:
        high_priority: on CUDA its kernels go before those of others; on a CPU the system decides.
    """
    if device.type == "cuda":
        from drivetrain.engine.parallel.streams_cuda import CudaStream

        return CudaStream.open(device, name, high_priority=high_priority)
    return HostStream(name)


def let_streams_end(within_s: float) -> bool:
    """Wait until the host's streams of this process have ended all that they were given.

    Where one has failed, the others may wait for what will not come: then nobody is waited for.

    Returns:
        Whether they have all ended.
    """
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _StreamThread)]
    ends: list[tuple[_StreamThread, _HostEvent]] = []
    for thread in threads:
        if thread is not threading.current_thread():
            end = _HostEvent()
            thread.worker.items.put((None, None, end))
            ends.append((thread, end))
    until = time.monotonic() + within_s
    while True:
        left = [thread for thread, end in ends if thread.is_alive() and not end.is_complete()]
        if not left:
            return True
        if time.monotonic() > until or any(thread.worker.failure is not None for thread in threads):
            return False
        time.sleep(_LOOK_S)


class _UsageClock:
    """Adds up what a stream does. Asked and told from several threads."""

    def __init__(self, doing: _Doing) -> None:
        self._lock = threading.Lock()
        self._doing = doing
        self._since = time.perf_counter()
        self._seconds: dict[_Doing, float] = {"busy": 0.0, "blocked": 0.0, "idle": 0.0}
        self._runs = 0

    def now(self, doing: _Doing, *, ended: bool = False) -> None:
        """From now on the stream is ``doing`` that; ``ended``: a piece of work has just ended."""
        with self._lock:
            self._pass()
            self._doing = doing
            self._runs += ended

    def take(self) -> Usage:
        with self._lock:
            self._pass()
            usage = Usage(self._runs, self._seconds["busy"], self._seconds["blocked"], self._seconds["idle"])
            self._seconds = {"busy": 0.0, "blocked": 0.0, "idle": 0.0}
            self._runs = 0
        return usage

    def _pass(self) -> None:
        now = time.perf_counter()
        self._seconds[self._doing] += now - self._since
        self._since = now


class CallerStream:
    """The stream of a CPU's own operations: the thread that calls. What it runs has ended when it returns."""

    name = "current"

    def __init__(self) -> None:
        self._clock = _UsageClock("busy")

    def run(self, work: Work, tensors: Sequence[Tensor] = ()) -> Event:  # noqa: ARG002 - kept alive by `work`
        """Call ``work`` now; an error is raised here."""
        with torch.no_grad():
            work()
        self._clock.now("busy", ended=True)
        return _PASSED

    def record(self) -> Event:
        """It is reached: operations on a CPU have ended when they return."""
        return _PASSED

    def wait(self, event: Event) -> None:
        """Block until ``event``."""
        if event.is_complete():
            event.wait()  # for its error
            return
        self._clock.now("blocked")
        try:
            event.wait()
        finally:
            self._clock.now("busy")

    def take_usage(self) -> Usage:
        """Blocked: in :meth:`wait`. Busy: all other time of the program, whatever it did."""
        return self._clock.take()

    def close(self) -> None:
        """There is nothing to end."""


class _Passed:
    """An event that is reached from the start."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def is_complete(self) -> bool:
        return True


_PASSED = _Passed()


class _Failure:
    """The error that ended a stream, and whether somebody was told."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._traceback = error.__traceback__
        self.told = False

    def tell(self) -> None:
        self.told = True
        # Told to several, an error would collect the tracebacks of all.
        raise self._error.with_traceback(self._traceback)


class _HostEvent:
    """A point in the work of a :class:`HostStream`."""

    __slots__ = ("_failure", "_reached")

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._failure: _Failure | None = None

    def wait(self) -> None:
        self._reached.wait()
        if self._failure is not None:
            self._failure.tell()

    def is_complete(self) -> bool:
        return self._reached.is_set()

    def reach(self, failure: _Failure | None) -> None:
        self._failure = failure
        self._reached.set()


class _Worker:
    """The thread's side of a :class:`HostStream`. It knows nothing of the stream, so that a forgotten one can end."""

    def __init__(self) -> None:
        # The thread of a process that was forked off is not there, and its queue may be locked for ever.
        self.process = os.getpid()
        self.items: queue.SimpleQueue[tuple[Work | None, Event | None, _HostEvent | None] | None] = (
            queue.SimpleQueue()
        )
        self.clock = _UsageClock("idle")
        self.failure: _Failure | None = None

    def main(self) -> None:
        with torch.no_grad():
            while (item := self.items.get()) is not None:
                self._do(*item)
                del item  # an idle stream keeps no tensors alive

    def _do(self, work: Work | None, awaited: Event | None, end: _HostEvent | None) -> None:
        ran = False
        if self.failure is None:
            try:
                if awaited is not None:
                    self.clock.now("blocked")
                    awaited.wait()
                if work is not None:
                    self.clock.now("busy")
                    work()
                    ran = True
            except BaseException as error:  # noqa: BLE001 - told to whoever waits
                self.failure = _Failure(error)
        # Before the event: who has waited for it finds the work counted.
        self.clock.now("idle", ended=ran)
        if end is not None:
            end.reach(self.failure)

    def leave(self, thread: threading.Thread) -> None:
        """The stream is forgotten, or the interpreter ends."""
        if os.getpid() != self.process:
            return
        self.items.put(None)
        if threading.current_thread() is not thread:
            thread.join(_LEAVE_S)


class _StreamThread(OneCoreThread):
    """By which the streams of a process are found among its threads."""

    def __init__(self, worker: _Worker, name: str) -> None:
        super().__init__(target=worker.main, name=f"stream {name}", daemon=True)
        self.worker = worker


class HostStream:
    """A thread that does work in order.

    Torch's operations and collectives let other threads run while they compute or wait, so a stream works beside its
    giver as far as there are cores. A process that is forked off must not use the streams of its parent.
    Torch's operations in it take one core.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._worker = _Worker()
        self._thread = _StreamThread(self._worker, name)
        self._thread.start()
        self._leave = weakref.finalize(self, self._worker.leave, self._thread)

    @property
    def name(self) -> str:
        """What it is for."""
        return self._name

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._end()  # the error under way is what is to be seen

    def run(self, work: Work, tensors: Sequence[Tensor] = ()) -> Event:  # noqa: ARG002 - kept alive by `work`
        """Have the thread call ``work``, which keeps what it refers to alive until then."""
        end = _HostEvent()
        self._give(work, None, end)
        return end

    def record(self) -> Event:
        """The end of everything that was given so far."""
        end = _HostEvent()
        self._give(None, None, end)
        return end

    def wait(self, event: Event) -> None:
        """The thread waits for ``event`` before it goes on; the caller does not."""
        self._give(None, event, None)

    def take_usage(self) -> Usage:
        """What the thread did. Work that waits for a wire is at work."""
        return self._worker.clock.take()

    def close(self) -> None:
        """Return when all work has ended and the thread is gone; a second time does nothing."""
        self._end()
        failure = self._worker.failure
        if failure is not None and not failure.told:
            failure.tell()

    def _end(self) -> None:
        if self._leave.detach() is None:
            return
        assert os.getpid() == self._worker.process, f"stream {self._name} belongs to another process"
        self._worker.items.put(None)
        self._thread.join()

    def _give(self, work: Work | None, awaited: Event | None, end: _HostEvent | None) -> None:
        assert os.getpid() == self._worker.process, f"stream {self._name} belongs to another process"
        assert self._leave.alive, f"stream {self._name} is closed"
        if self._worker.failure is not None:
            self._worker.failure.tell()
        self._worker.items.put((work, awaited, end))
