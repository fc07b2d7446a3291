"""Copies between a device and host memory, beside the computation: what travels, in which order, and what it costs.

Two streams (:mod:`drivetrain.engine.parallel.streams`), one for each direction, so that a link that carries both ways
at once does. A copy begins when what the caller has computed so far has ended, and, on its way back, when what it
copies has arrived at the host; whoever is about to use what was copied waits for its event. That is all the ordering
there is, and on a CPU it is the same code: streams are threads, and what is called the device is other memory of the
same host. A run on a CPU therefore pays for the copies and saves nothing.

Host memory is pinned where the device is an accelerator: only then does a copy run beside the computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.profiler import record_function

from drivetrain.engine.parallel.streams import Event, Stream, current_stream, open_stream
from drivetrain.engine.timing import Mark, elapsed_s, mark

__all__ = ["OFFLOAD_WAIT", "CopyEngine", "Moved", "nothing_is_saved"]

OFFLOAD_WAIT = "drivetrain/offload/wait"
"""Span in which the caller stood waiting for a copy; on CUDA it is the device that waits, and the span is empty."""

Pairs = Sequence[tuple[Tensor, Tensor]]


def nothing_is_saved(device: torch.device) -> str | None:
    """What is to be said of a run on a CPU; None elsewhere."""
    if device.type != "cpu":
        return None
    return "the device is a CPU: its memory is the host's, so that copies are made and no memory is saved"


@dataclass(frozen=True)
class Moved:
    """What was copied since the figures were last taken.

    Attributes:
        to_host_bytes, to_device_bytes: handed to the copies of each direction.
        waits: marks around each wait of the computation for a copy.
    """

    to_host_bytes: int = 0
    to_device_bytes: int = 0
    waits: tuple[tuple[Mark, Mark], ...] = field(default=(), repr=False)

    @property
    def nbytes(self) -> int:
        """Both directions together."""
        return self.to_host_bytes + self.to_device_bytes

    @property
    def exposed_s(self) -> float:
        """Seconds for which the computation waited for copies. On CUDA it waits for the last mark: ask when the step
        has long passed."""
        return sum(elapsed_s(*pair) for pair in self.waits)


class CopyEngine:
    """The two streams of one device, and the figures of what they carried.

    Args:
        device: of the tensors that are not on the host. A CPU: see the module.

    Streams are opened when they are first used: who only builds what would copy has no threads of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._to_host_bytes = 0
        self._to_device_bytes = 0
        self._waits: list[tuple[Mark, Mark]] = []
        self._flying: list[tuple[Event, Pairs]] = []

    @cached_property
    def outward(self) -> Stream:
        """Carries to the host."""
        return open_stream(self.device, "offload out")

    @cached_property
    def inward(self) -> Stream:
        """Carries to the device."""
        return open_stream(self.device, "offload in")

    @property
    def pins_memory(self) -> bool:
        """Whether host memory is pinned."""
        return self.device.type != "cpu"

    def host_zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory, to be copied from and to."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=self.pins_memory)

    def host_empty(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8 in host memory, of any values. Pinned memory comes from torch's cache of it."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pins_memory)

    def to_host(self, pairs: Pairs) -> Event:
        """Copy each first tensor, on the device, into the second, on the host, after what the caller has computed so
        far. The first are left unchanged until somebody has waited for the event."""
        self._to_host_bytes += sum(source.nbytes for source, _ in pairs)
        return self._fly(self.outward, pairs, None)

    def to_device(self, pairs: Pairs, after: Event | None = None) -> Event:
        """Copy each first tensor, on the host, into the second, on the device, after ``after`` (what is copied has
        arrived at the host) and after what the caller has computed so far (nobody reads the second any more)."""
        self._to_device_bytes += sum(source.nbytes for source, _ in pairs)
        return self._fly(self.inward, pairs, after)

    def wait(self, event: Event) -> None:
        """What the caller computes from now on comes after ``event``. The time it costs is counted."""
        current = current_stream(self.device)
        if self.device.type == "cpu" and event.is_complete():
            current.wait(event)  # for its error
        else:
            before = mark(self.device)
            with record_function(OFFLOAD_WAIT):
                current.wait(event)
            self._waits.append((before, mark(self.device)))
        self._flying = [flight for flight in self._flying if flight[0] is not event]

    def wait_on_host(self, event: Event) -> None:
        """Return when ``event`` is over: what has arrived is read by the host itself. Counted as :meth:`wait` is; on
        CUDA it is the time for which the device has nothing to do meanwhile."""
        before = mark(self.device)
        with record_function(OFFLOAD_WAIT):
            event.wait()
        self._waits.append((before, mark(self.device)))
        self._flying = [flight for flight in self._flying if flight[0] is not event]

    def take(self) -> Moved:
        """The figures since the last call. Never waits."""
        self._forget_landed()
        moved = Moved(self._to_host_bytes, self._to_device_bytes, tuple(self._waits))
        self._to_host_bytes, self._to_device_bytes, self._waits = 0, 0, []
        return moved

    def _fly(self, stream: Stream, pairs: Pairs, after: Event | None) -> Event:
        self._forget_landed()
        stream.wait(current_stream(self.device).record())
        if after is not None:
            stream.wait(after)
        end = stream.run(lambda: _copy(pairs))
        # On CUDA nothing else keeps memory that a copy reads or writes from being given to others; to tell its
        # allocator of the stream would keep the memory longer than the wait for the event does.
        self._flying.append((end, pairs))
        return end

    def _forget_landed(self) -> None:
        self._flying = [flight for flight in self._flying if not flight[0].is_complete()]

    def close(self) -> None:
        """Return when everything has arrived.

        Raises:
            BaseException: what a copy raised, if nobody was told yet.
        """
        for name in ("outward", "inward"):
            if name in vars(self):
                vars(self).pop(name).close()


def _copy(pairs: Pairs) -> None:
    for source, destination in pairs:
        destination.copy_(source, non_blocking=True)
