"""How long a call takes on a device, and how much time is left for measuring."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

__all__ = ["Budget", "Clock", "CudaClock", "DryClock", "Turn", "interleaved"]

Call = Callable[[], Any]


@dataclass(frozen=True)
class Budget:
    """Time until a moment.

    Attributes:
        deadline: by ``time.monotonic``, in seconds.
    """

    deadline: float

    @staticmethod
    def of(seconds: float) -> "Budget":
        """From now on."""
        return Budget(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds; not below 0."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self.left == 0.0

    def share(self, number: int) -> "Budget":
        """The first of ``number`` equal parts of what is left."""
        return Budget(time.monotonic() + self.left / number)


@dataclass(frozen=True)
class Turn:
    """Some calls in a row.

    Attributes:
        times: of each on the device, in seconds; empty on a clock that measures nothing.
        host_s: that the host took to hand in one call.
    """

    times: Sequence[float]
    host_s: float


class Clock(Protocol):
    """Runs calls and times them; all that is particular to a kind of device."""

    def turn(self, call: Call, repeats: int) -> Turn:
        """``repeats`` timed calls, after one that is not timed."""

    def periods(self, step: Call, budget: Budget, *, warm: int, least: int, most: int) -> list[float]:
        """Seconds from the end of one ``step`` to the end of the next, after ``warm`` that are not timed: ``least`` of
        them, and up to ``most`` while time is left."""

    def peak_bytes(self, call: Call) -> int | None:
        """Most bytes that a call holds beyond what is held before it; None where nobody counts."""

    def settle(self) -> None:
        """Wait for the device, and give memory that nothing holds back to it.

        Raises:
            RuntimeError: an earlier call has left the device unusable for this process.
        """


class DryClock:
    """Runs each call once or twice and times none."""

    def turn(self, call: Call, repeats: int) -> Turn:
        """No times, whatever ``repeats`` says."""
        assert repeats > 0
        call()
        return Turn((), 0.0)

    def periods(self, step: Call, budget: Budget, *, warm: int, least: int, most: int) -> list[float]:
        """Two steps without a time."""
        assert warm + least <= warm + most
        del budget
        step()
        step()
        return []

    def peak_bytes(self, call: Call) -> int | None:
        """The call is run and nothing counted."""
        call()
        return None

    def settle(self) -> None:
        """A CPU has done what it was told."""


_LEAST_FLUSH = 64 << 20
_LEAD = 1.5
_MOST_FLUSHES = 64
_AHEAD = 2
"""Steps that the host may be ahead of the device: it would hand in all of them before the time is up."""


class CudaClock:
    """CUDA events around each call.

    Before each call a buffer of four times the L2 cache is overwritten: inputs come from memory, as they do in a model
    whose layers are larger than the cache. The device is kept busy with that for longer than the host takes to hand in
    the call, so that launching is not timed; a call that waits for the device by itself is timed with its waiting.

    Args:
        cuda: ``torch.cuda``, or what a test puts in its place.

    Attributes:
        flush_bytes: size of the buffer.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        cache = int(cuda.get_device_properties(device).L2_cache_size)
        self.flush_bytes = max(4 * cache, _LEAST_FLUSH)
        self._buffer = torch.empty(self.flush_bytes, dtype=torch.uint8, device=device)
        self._buffer.zero_()
        self._flush_s = min(self._events(self._buffer.zero_, 5, 0))

    def turn(self, call: Call, repeats: int) -> Turn:
        """See :class:`Clock`."""
        self._cuda.synchronize(self._device)
        start = time.perf_counter()
        call()
        host_s = time.perf_counter() - start
        flushes = min(_MOST_FLUSHES, math.ceil(max(1.0, _LEAD * host_s / self._flush_s)))
        return Turn(self._events(call, repeats, flushes), host_s)

    def periods(self, step: Call, budget: Budget, *, warm: int, least: int, most: int) -> list[float]:
        """See :class:`Clock`. The device is not waited for between steps."""
        for _ in range(warm):
            step()
        events = [self._mark()]
        while len(events) <= least or (len(events) <= most and not budget.spent):
            step()
            events.append(self._mark())
            events[max(0, len(events) - 1 - _AHEAD)].synchronize()
        self._cuda.synchronize(self._device)
        return [first.elapsed_time(second) / 1e3 for first, second in pairwise(events)]

    def peak_bytes(self, call: Call) -> int | None:
        """By torch's allocator."""
        self._cuda.synchronize(self._device)
        before = self._cuda.memory_allocated(self._device)
        self._cuda.reset_peak_memory_stats(self._device)
        call()
        self._cuda.synchronize(self._device)
        return int(self._cuda.max_memory_allocated(self._device)) - int(before)

    def settle(self) -> None:
        """See :class:`Clock`."""
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()

    def _mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def _events(self, call: Call, repeats: int, flushes: int) -> list[float]:
        pairs = []
        for _ in range(repeats):
            for _ in range(flushes):
                self._buffer.zero_()
            first = self._mark()
            call()
            pairs.append((first, self._mark()))
        self._cuda.synchronize(self._device)
        return [first.elapsed_time(last) / 1e3 for first, last in pairs]


def interleaved(
    clock: Clock, sides: Mapping[str, Call], budget: Budget, *, rounds: int = 8, repeats: int = 4
) -> dict[str, Turn]:
    """All ``sides`` in turns A B C C B A, so that drift hits all alike; at least one round, then while time is left.

    ``host_s`` of the result is the least of all turns.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    host: dict[str, float] = dict.fromkeys(sides, math.inf)
    for number in range(rounds):
        if number and budget.spent:
            break
        for name in (*sides, *reversed(list(sides))):
            turn = clock.turn(sides[name], repeats)
            times[name] += turn.times
            host[name] = min(host[name], turn.host_s)
    return {name: Turn(times[name], host[name]) for name in sides}
