"""Collectives along one dimension of the mesh, and the pairs of them that are each other's derivative.

=============== ====================== ======================
function        forward                backward
=============== ====================== ======================
``copied``      nothing                all-reduce (sum)
``summed``      all-reduce (sum)       nothing
``gathered``    all-gather             reduce-scatter (sum)
``scattered``   reduce-scatter (sum)   all-gather
``joined``      all-reduce of parts    the own part
=============== ====================== ======================

Every one of them counts its payload in :class:`~drivetrain.engine.parallel.traffic.Traffic`, and is a flight there.
They are left out of compiled graphs, so that the order of collectives is the program's own on every rank.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.failures import explained_in
from drivetrain.engine.parallel.flat_collectives import CountedGroup
from drivetrain.engine.parallel.flights import Flight, flown
from drivetrain.engine.parallel.reduce_scatter import exchange_and_add, exchanges
from drivetrain.engine.parallel.torch_names import all_gather_flat, reduce_scatter_flat
from drivetrain.engine.parallel.traffic import Traffic

__all__ = ["Group", "copied", "gathered", "joined", "scattered", "summed"]


@dataclass(frozen=True)
class Group:
    """Ranks that exchange tensors.

    Attributes:
        name: the dimension of the mesh they lie along, under which their traffic is counted.
        process_group: torch's group; tensors are on a device it serves.
        size, index: number of ranks, and this rank's place among them.
        traffic: where payloads are counted.
    """

    name: str
    process_group: dist.ProcessGroup
    size: int
    index: int
    traffic: Traffic

    @cached_property
    def begun(self) -> CountedGroup:
        """The same ranks, for collectives that are begun and waited for later."""
        return CountedGroup(self.process_group, self.name, self.traffic)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """The sum (or ``op``) over the ranks in a new tensor, equal on all of them."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        flight = self.traffic.begin(self.name, "all_reduce", result.nbytes, self.process_group)
        with explained_in("all-reduce", self.name, self.process_group):
            flown(lambda go_on: dist.all_reduce(result, op, group=self.process_group, async_op=go_on), flight)
        return result

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The equally large tensors of all ranks, one behind the other along ``dim``."""
        part = tensor.detach().movedim(dim, 0).contiguous()
        whole = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        flight = self.traffic.begin(self.name, "all_gather", part.nbytes, self.process_group)
        with explained_in("all-gather", self.name, self.process_group):
            flown(
                lambda go_on: all_gather_flat(
                    whole.view(-1), part.view(-1), group=self.process_group, async_op=go_on
                ),
                flight,
            )
        return whole.movedim(0, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's part along ``dim`` of the sum over the ranks; ``size`` divides the dimension."""
        whole = tensor.detach().movedim(dim, 0).contiguous()
        assert whole.shape[0] % self.size == 0, f"{self.size} ranks do not divide {whole.shape[0]}"
        part = whole.new_empty(whole.shape[0] // self.size, *whole.shape[1:])
        flight = self.traffic.begin(self.name, "reduce_scatter", whole.nbytes, self.process_group)
        with explained_in("reduce-scatter", self.name, self.process_group):
            if exchanges(self.process_group, whole.device):
                self._exchange(part.view(-1), whole.view(self.size, -1), flight)
            else:
                flown(
                    lambda go_on: reduce_scatter_flat(
                        part.view(-1), whole.view(-1), group=self.process_group, async_op=go_on
                    ),
                    flight,
                )
        return part.movedim(0, dim)

    def _exchange(self, share: Tensor, rows: Tensor, flight: Flight | None) -> None:
        with nullcontext() if flight is None else flight.waiting():
            exchange_and_add(share, rows, self.process_group)
            if flight is not None:
                flight.landed()


class _Pair(torch.autograd.Function):
    """One function forward and another backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.backward_function = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_function(gradient), None, None


_Function = Callable[[Tensor], Tensor]


def _apply(x: Tensor, forward: _Function, backward: _Function) -> Tensor:
    result: Tensor = _Pair.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


_pair: Callable[[Tensor, _Function, _Function], Tensor] = torch.compiler.disable(_apply)


def _unchanged(x: Tensor) -> Tensor:
    return x.view_as(x)


def copied(x: Tensor, group: Group) -> Tensor:
    """``x``, which every rank holds alike and uses in its own way: its gradient is the sum over the ranks."""
    return _pair(x, _unchanged, group.all_reduce)


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' ``x``, from where on all compute alike: the gradient of each is that of the sum."""
    return _pair(x, group.all_reduce, _unchanged)


def gathered(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """The ranks' parts ``x`` behind one another along ``dim``, for each rank to use in its own way."""
    return _pair(x, lambda part: group.all_gather(part, dim), lambda whole: group.reduce_scatter(whole, dim))


def scattered(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's part along ``dim`` of the sum of the ranks' ``x``."""
    return _pair(x, lambda whole: group.reduce_scatter(whole, dim), lambda part: group.all_gather(part, dim))


def joined(x: Tensor, group: Group, offset: int, length: int) -> Tensor:
    """The whole last dimension of ``length`` whose part from ``offset`` on is ``x``, from where on all compute alike.

    Parts may differ in size: zeros stand for the others' parts in a sum.
    """
    last = offset + x.shape[-1]

    def forward(part: Tensor) -> Tensor:
        whole = part.new_zeros(*part.shape[:-1], length)
        whole[..., offset:last] = part
        return group.all_reduce(whole)

    return _pair(x, forward, lambda whole: whole[..., offset:last])
