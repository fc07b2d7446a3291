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

Every one of them counts its payload in :class:`~drivetrain.engine.parallel.traffic.Traffic`. They are left out of
compiled graphs, so that the order of collectives is the program's own on every rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.parallel.flat_collectives import all_gather_flat, reduce_scatter_flat
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

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """The sum (or ``op``) over the ranks in a new tensor, equal on all of them."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.traffic.record(self.name, "all_reduce", result.nbytes)
        dist.all_reduce(result, op, group=self.process_group)
        return result

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The equally large tensors of all ranks, one behind the other along ``dim``."""
        part = tensor.detach().movedim(dim, 0).contiguous()
        whole = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        self.traffic.record(self.name, "all_gather", part.nbytes)
        all_gather_flat(whole.view(-1), part.view(-1), group=self.process_group)
        return whole.movedim(0, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's part along ``dim`` of the sum over the ranks; ``size`` divides the dimension."""
        whole = tensor.detach().movedim(dim, 0).contiguous()
        assert whole.shape[0] % self.size == 0, f"{self.size} ranks do not divide {whole.shape[0]}"
        part = whole.new_empty(whole.shape[0] // self.size, *whole.shape[1:])
        self.traffic.record(self.name, "reduce_scatter", whole.nbytes)
        reduce_scatter_flat(part.view(-1), whole.view(-1), group=self.process_group)
        return part.movedim(0, dim)


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
