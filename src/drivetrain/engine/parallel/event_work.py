"""Torch's ``Work`` for what ends with an event of a stream, so that it is waited for as any collective."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import torch.distributed as dist

from drivetrain.engine.parallel.flights import Flight
from drivetrain.engine.parallel.streams import Event, Stream

__all__ = ["EventWork"]


class EventWork(dist.Work):
    """A collective that is complete when ``end`` is reached.

    Args:
        end: of the last thing that belongs to it.
        current: asked by each wait for what is to wait: on a CPU the thread, on CUDA the stream that the caller's
            operations run in by then.
        flight: where waits are noted; its landing is noted by who knows of it.
    """

    def __init__(self, end: Event, current: Callable[[], Stream], flight: Flight | None = None) -> None:
        super().__init__()
        self._end = end
        self._current = current
        self._flight = flight

    def wait(self, timeout: timedelta | None = None) -> bool:
        """What the caller does from now on comes after it. The time limit is that of its process groups."""
        assert timeout is None, "a limit of its own is not kept"
        with nullcontext() if self._flight is None else self._flight.waiting():
            self._current().wait(self._end)
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not. Never waits."""
        return self._end.is_complete()
