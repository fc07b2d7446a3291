"""Collectives in two levels: inside a machine, between machines, inside again, so that little crosses the slow links.

With H machines of L ranks each, and S bytes handed over by a rank:

==============  ============================================  ========================  =========================
collective      phases                                        a machine sends           flat, on a ring
==============  ============================================  ========================  =========================
all-reduce      reduce-scatter in, all-reduce, all-gather in  ``2 (H-1)/H S``           ``2 (HL-1)/(HL) S``
reduce-scatter  reduce-scatter in, reduce-scatter             ``(H-1)/H S``             ``(HL-1)/(HL) S``
all-gather      all-gather, all-gather in                     ``(H-1) L S``             ``(HL-1) S``
==============  ============================================  ========================  =========================

Two machines of two ranks: 2/3 of a flat all-reduce's bytes between them, of two times eight 8/15. Gloo's all-to-all, by
which our reduce-scatter travels, sends ``(H-1)/H L S`` between machines when it is flat: there it is L times less.

The phases of one collective follow each other and those of several overlap: while one bucket is between machines, the
next is summed inside. Each level has a stream and a process group of its own, so that all ranks begin the collectives
of a group in the same order, whichever arrives first; and an all-gather inside does not wait behind a reduce-scatter
that came later.

Sums are those of the machines' sums: the order differs from that of a flat collective, and is the same in each run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from drivetrain.engine.failures import explained_in
from drivetrain.engine.parallel.event_work import EventWork
from drivetrain.engine.parallel.flights import Flight
from drivetrain.engine.parallel.reduce_scatter import exchange_and_add, exchanges
from drivetrain.engine.parallel.streams import Event, Stream, current_stream, open_stream
from drivetrain.engine.parallel.torch_names import all_gather_flat, reduce_scatter_flat
from drivetrain.engine.parallel.traffic import Traffic

__all__ = ["ACROSS", "INSIDE", "LEVELS_SPAN", "Hierarchy", "LevelGroups"]

LEVELS_SPAN = "drivetrain/levels/"
"""Begins the name of the region of a profile in which a collective is handed over; its kind follows."""
INSIDE, ACROSS = "host", "across"
"""What is put behind a dimension's name for the traffic of a level: ``dp_host``, ``dp_across``."""


@dataclass(frozen=True)
class LevelGroups:
    """This rank's process groups at both levels of one group of ranks, which lie machine by machine in its order.

    Attributes:
        inside: the ranks of this machine.
        inside_again: the same ranks, in a group of its own for what comes last.
        across: of each machine the rank at this one's place.
        hosts, per_host: machines, and ranks of each.
    """

    inside: dist.ProcessGroup
    inside_again: dist.ProcessGroup
    across: dist.ProcessGroup
    hosts: int
    per_host: int


class _Level:
    """A process group and the stream in which its collectives follow each other."""

    def __init__(self, what: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.stream: Stream = open_stream(device, what)
        self._what = what

    def run(
        self, kind: str, collective: Callable[[], object], tensors: Sequence[Tensor], after: Event
    ) -> Event:
        """Do ``collective`` after ``after`` and after what the level was given before; returns its end."""

        def work() -> None:
            with explained_in(kind, self._what, self.group):
                collective()

        self.stream.wait(after)
        return self.stream.run(work, tensors)


class Hierarchy:
    """The collectives of one group of ranks in two levels. One object for each, whoever calls: it keeps their order.

    Args:
        dim: dimension of the mesh that the group lies along.
        device: where the tensors are.
    """

    def __init__(self, dim: str, groups: LevelGroups, device: torch.device) -> None:
        self.hosts, self.per_host = groups.hosts, groups.per_host
        self._device = device
        self._current = current_stream(device)
        self._inside = _Level(f"{dim} inside the machine", groups.inside, device)
        self._across = _Level(f"{dim} between machines", groups.across, device)
        self._inside_again = _Level(f"{dim} inside the machine again", groups.inside_again, device)
        self._exchanges = exchanges(groups.inside, device)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Those that its collectives run in, and the caller's, which waits for them: for their idle time."""
        return (self._inside.stream, self._across.stream, self._inside_again.stream, self._current)

    def all_reduce(self, tensor: Tensor, name: str, traffic: Traffic) -> EventWork:
        """Begin to sum ``tensor`` over the ranks in place.

        Args:
            name: under which the caller's collectives are counted.
        """
        with record_function(f"{LEVELS_SPAN}all_reduce"):
            return self._all_reduce(tensor, name, traffic)

    def _all_reduce(self, tensor: Tensor, name: str, traffic: Traffic) -> EventWork:
        flat = tensor.view(-1)
        length = -(-flat.numel() // self.per_host)
        even = flat.numel() == length * self.per_host
        padded = flat if even else flat.new_zeros(length * self.per_host)
        own = flat.new_empty(length)
        traffic.record(f"{name}_{INSIDE}", "reduce_scatter", padded.nbytes)
        traffic.record(f"{name}_{ACROSS}", "all_reduce", own.nbytes)
        traffic.record(f"{name}_{INSIDE}", "all_gather", own.nbytes)
        flight = self._flight(name, "all_reduce", tensor.nbytes, traffic)

        def into_parts() -> None:
            if not even:
                padded[: flat.numel()].copy_(flat)
            self._sum_rows(own, padded.view(self.per_host, length), self._inside.group)

        def between() -> None:
            dist.all_reduce(own, group=self._across.group)

        def from_parts() -> None:
            all_gather_flat(padded, own, group=self._inside_again.group)
            if not even:
                flat.copy_(padded[: flat.numel()])
            _land(flight)

        tensors = (tensor, padded, own)
        summed = self._inside.run("reduce-scatter", into_parts, tensors, self._caller().record())
        total = self._across.run("all-reduce", between, (own,), summed)
        end = self._inside_again.run("all-gather", from_parts, tensors, total)
        return EventWork(end, self._caller, flight)

    def reduce_scatter(self, share: Tensor, buffer: Tensor, name: str, traffic: Traffic) -> EventWork:
        """Begin to sum ``buffer`` (size, n) over the ranks; row r of the sum goes to ``share`` (n,) of rank r.

        ``share`` has the buffer's dtype, or fp32 where that has 16 bits; between machines the buffer's dtype travels.
        """
        with record_function(f"{LEVELS_SPAN}reduce_scatter"):
            return self._reduce_and_scatter(share, buffer, name, traffic)

    def _reduce_and_scatter(self, share: Tensor, buffer: Tensor, name: str, traffic: Traffic) -> EventWork:
        own = buffer.new_empty(self.hosts, buffer.shape[-1])
        traffic.record(f"{name}_{INSIDE}", "reduce_scatter", buffer.nbytes)
        traffic.record(f"{name}_{ACROSS}", "reduce_scatter", own.nbytes)
        flight = self._flight(name, "reduce_scatter", buffer.nbytes, traffic)

        def inside() -> None:
            # Rows of the ranks at the same place of their machines go to the one that is at it here.
            by_place = buffer.view(self.hosts, self.per_host, -1).transpose(0, 1).contiguous()
            self._sum_rows(own.view(-1), by_place.view(self.per_host, -1), self._inside.group)

        def between() -> None:
            self._sum_rows(share, own, self._across.group)
            _land(flight)

        summed = self._inside.run("reduce-scatter", inside, (buffer, own), self._caller().record())
        end = self._across.run("reduce-scatter", between, (own, share), summed)
        return EventWork(end, self._caller, flight)

    def all_gather(self, buffer: Tensor, share: Tensor, name: str, traffic: Traffic) -> EventWork:
        """Begin to put ``share`` (n,) of rank r into row r of ``buffer`` (size, n) on every rank."""
        with record_function(f"{LEVELS_SPAN}all_gather"):
            return self._all_gather(buffer, share, name, traffic)

    def _all_gather(self, buffer: Tensor, share: Tensor, name: str, traffic: Traffic) -> EventWork:
        same_place = share.new_empty(self.hosts, share.numel())
        traffic.record(f"{name}_{ACROSS}", "all_gather", share.nbytes)
        traffic.record(f"{name}_{INSIDE}", "all_gather", same_place.nbytes)
        flight = self._flight(name, "all_gather", share.nbytes, traffic)

        def between() -> None:
            all_gather_flat(same_place.view(-1), share, group=self._across.group)

        def inside() -> None:
            by_place = same_place.new_empty(self.per_host, self.hosts, share.numel())
            all_gather_flat(by_place.view(-1), same_place.view(-1), group=self._inside_again.group)
            buffer.view(self.hosts, self.per_host, -1).copy_(by_place.transpose(0, 1))
            _land(flight)

        gathered = self._across.run("all-gather", between, (share, same_place), self._caller().record())
        end = self._inside_again.run("all-gather", inside, (same_place, buffer), gathered)
        return EventWork(end, self._caller, flight)

    def _caller(self) -> Stream:
        """What the caller's own operations run in. On CUDA it may be another at each call: FSDP2 copies, hands over and
        waits in streams of its own."""
        return current_stream(self._device) if self._device.type == "cuda" else self._current

    def _sum_rows(self, share: Tensor, rows: Tensor, group: dist.ProcessGroup) -> None:
        # NCCL sums 16 bits in 16 bits, rounding after each addition, and not into a result of 32.
        if self._exchanges or rows.dtype in (torch.bfloat16, torch.float16):
            exchange_and_add(share, rows, group)
        else:
            reduce_scatter_flat(share, rows.view(-1), group=group)

    def _flight(self, name: str, kind: str, payload: int, traffic: Traffic) -> Flight | None:
        """The whole of it, as the caller sees it: its phases are counted, and not timed one by one."""
        if traffic.flights is None:
            return None
        return traffic.flights.begin(name, kind, payload, self._across.group)


def _land(flight: Flight | None) -> None:
    if flight is not None:
        flight.landed()
