"""CUDA's streams and events behind the protocol of :mod:`drivetrain.engine.parallel.streams`.

The host runs ahead: work is called at once, and what it launches is ordered by the device. A kernel that fails shows at
the next call of CUDA that looks, as everywhere; an error that work raises on the host is raised by ``run``.
"""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from drivetrain.engine.parallel.streams import Event, Usage

__all__ = ["CudaEvent", "CudaStream"]

_MOST_PAIRS = 4096
"""Of marks that nobody has asked for; what is beyond is not counted, so that memory is bounded."""


class CudaEvent:
    """A point in the work of a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def wait(self) -> None:
        """Block the host until it is reached."""
        self.event.synchronize()

    def is_complete(self) -> bool:
        """Whether it is reached."""
        return bool(self.event.query())


class CudaStream:
    """A stream of a CUDA device. How long it is busy is told by pairs of timed events around each piece of work."""

    def __init__(self, stream: torch.cuda.Stream, name: str, *, counted: bool) -> None:
        self._stream = stream
        self._name = name
        self._counted = counted
        self._since = time.perf_counter()
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._lost = False

    @classmethod
    def current(cls, device: torch.device) -> Self:
        """The stream that operations of the caller run in. Its work is not counted: nobody gives it by :meth:`run`."""
        return cls(torch.cuda.current_stream(device), "current", counted=False)

    @classmethod
    def open(cls, device: torch.device, name: str, *, high_priority: bool = False) -> Self:
        """A stream beside it."""
        # CUDA's least priority is 0, more urgent ones are negative.
        return cls(torch.cuda.Stream(device, priority=-1 if high_priority else 0), name, counted=True)

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

    def run(self, work: Callable[[], object], tensors: Sequence[Tensor] = ()) -> Event:
        """Call ``work`` now, with this stream as the current one."""
        first = self._mark()
        with torch.cuda.stream(self._stream), torch.no_grad():
            work()
        last = self._mark()
        if first is not None and last is not None:
            self._marks.append((first, last))
        for tensor in tensors:
            # The allocator must not hand out this memory to the stream it was made on before this one is done.
            tensor.record_stream(self._stream)
        return self.record()

    def record(self) -> Event:
        """The end of everything that was launched into it so far."""
        return CudaEvent(self._stream)

    def wait(self, event: Event) -> None:
        """The device orders it; an event of the host is waited for by the host."""
        if isinstance(event, CudaEvent):
            self._stream.wait_event(event.event)
        else:
            event.wait()

    def take_usage(self) -> Usage | None:
        """Busy: from the start to the end of each piece of work on the device, of those that have ended by now. None
        for the current stream, or when more work passed than is kept."""
        if not self._counted:
            return None
        now = time.perf_counter()
        ended = [pair for pair in self._marks if pair[1].query()]
        self._marks = self._marks[len(ended) :]
        busy = sum(first.elapsed_time(last) for first, last in ended) / 1e3
        wall, self._since = now - self._since, now
        lost, self._lost = self._lost, False
        # Work that began before the last call and ended after it counts here as a whole.
        return None if lost else Usage(len(ended), busy, None, max(0.0, wall - busy))

    def close(self) -> None:
        """Return when the device has done all of it."""
        self._stream.synchronize()

    def _mark(self) -> torch.cuda.Event | None:
        if not self._counted:
            return None
        if len(self._marks) >= _MOST_PAIRS:
            self._lost = True
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
