"""Collectives of flat buffers: counted, followed, and in levels where their ranks lie on several machines."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.failures import explained_in
from drivetrain.engine.parallel.event_work import EventWork
from drivetrain.engine.parallel.flights import Flight, watched
from drivetrain.engine.parallel.hierarchy import Hierarchy
from drivetrain.engine.parallel.reduce_scatter import begin_exchange_and_add, exchanges
from drivetrain.engine.parallel.streams import Stream, current_stream, open_stream
from drivetrain.engine.parallel.torch_names import all_gather_flat, reduce_scatter_flat
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.parallel.wrapped_work import WrappedWork

__all__ = ["CountedGroup", "all_gather_flat", "reduce_scatter_flat"]


class CountedGroup:
    """A process group whose collectives are counted, and followed, under the name of its dimension of the mesh.

    In levels, those inside a machine and between machines are counted apart, as ``dp_host`` and ``dp_across``.

    Args:
        group: None: a single rank, whose collectives must not be called.
        name: of the dimension: "dp", "dp_shard" or "dp_replicate".
        hierarchy: by which its collectives go in levels; None: they are flat.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        name: str,
        traffic: Traffic,
        hierarchy: Hierarchy | None = None,
    ) -> None:
        self.group = group
        self.size = 1 if group is None else group.size()
        self._name = name
        self._traffic = traffic
        self._hierarchy = hierarchy
        self._adding: tuple[Stream, Stream] | None = None

    @property
    def in_levels(self) -> bool:
        """Whether its collectives go inside machines and between them."""
        return self._hierarchy is not None

    def begin(self, kind: str, bytes: int) -> Flight | None:
        """Count, and follow, a collective that the caller hands over itself."""
        return self._traffic.begin(self._name, kind, bytes, self.group)

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """Begin to sum ``tensor`` over the ranks in place."""
        if self._hierarchy is not None:
            return self._hierarchy.all_reduce(tensor, self._name, self._traffic)
        flight = self.begin("all_reduce", tensor.nbytes)
        work = self._begun("all-reduce", lambda: dist.all_reduce(tensor, group=self.group, async_op=True))
        return watched(work, flight)

    def reduce_scatter(self, share: Tensor, buffer: Tensor) -> dist.Work:
        """Begin to sum ``buffer`` (size, n) over the ranks; row r of the sum goes to ``share`` (n,) of rank r.

        Over gloo, ``share`` may be fp32 where ``buffer`` has 16 bits: that is what they are added up in.
        """
        if self._hierarchy is not None:
            return self._hierarchy.reduce_scatter(share, buffer, self._name, self._traffic)
        flight = self.begin("reduce_scatter", buffer.nbytes)
        if not exchanges(self.group, buffer.device):
            work = self._begun(
                "reduce-scatter",
                lambda: reduce_scatter_flat(share, buffer.view(-1), group=self.group, async_op=True),
            )
            return watched(work, flight)
        stream, current = self._adding or self._open(buffer.device)
        with explained_in("reduce-scatter", self._name, self.group):
            end = begin_exchange_and_add(
                share,
                buffer,
                self.group,
                stream,
                name=self._name,
                landed=None if flight is None else flight.landed,
            )
        return EventWork(end, lambda: current, flight)

    def all_gather(self, buffer: Tensor, share: Tensor) -> dist.Work:
        """Begin to put ``share`` (n,) of rank r into row r of ``buffer`` (size, n) on every rank."""
        if self._hierarchy is not None:
            return self._hierarchy.all_gather(buffer, share, self._name, self._traffic)
        flight = self.begin("all_gather", share.nbytes)
        work = self._begun(
            "all-gather", lambda: all_gather_flat(buffer.view(-1), share, group=self.group, async_op=True)
        )
        return watched(work, flight)

    def _open(self, device: torch.device) -> tuple[Stream, Stream]:
        """What adds up the rows that arrive, and what waits for it."""
        self._adding = open_stream(device, f"{self._name} reduce-scatter"), current_stream(device)
        return self._adding

    def _begun(self, kind: str, launch: Callable[[], dist.Work | None]) -> dist.Work:
        with explained_in(kind, self._name, self.group):
            work = launch()
        assert work is not None, "this rank is not in the group"
        return WrappedWork(work, lambda: explained_in(kind, self._name, self.group))
