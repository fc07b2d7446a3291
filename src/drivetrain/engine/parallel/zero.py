"""ZeRO stages 0 to 2 over plain parameters: gradients travel in buckets while backward still computes.

Rajbhandari et al. 2020 (arXiv:1910.02054): stage 0 replicates everything, stage 1 shards the moments, stage 2 the
gradients too. What is resident where is stated in :mod:`drivetrain.engine.parallel.resident`, when a bucket starts in
:mod:`drivetrain.engine.parallel.bucketed`.
"""

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from drivetrain.engine.parallel.bucketed import BucketedGradients
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.sharded_update import ShardedUpdate
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.parallel.wire import (
    LowPrecisionScatter,
    LowPrecisionSum,
    Travelling,
    packing,
    scatter_sum,
    whole_sum,
)
from drivetrain.engine.timing import mark

__all__ = ["AllReducedGradients", "ReduceScatteredGradients"]

_BUFFERS_IN_FLIGHT = 2
"""Buckets that are being reduce-scattered at once, and buckets whose sum in low precision is in its first half. More
would only wait in the same queue, and hold memory."""


class AllReducedGradients(BucketedGradients):
    """Stages 0 and 1: whole gradients everywhere. They are views of their bucket, so that nothing is copied twice.

    Reduced with each micro-batch, a second set of gradients holds the sum of those that were reduced already.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        placements: Mapping[str, Placement],
        traffic: Traffic,
        *,
        bucket_size_mb: float,
        reduce_each_micro_batch: bool = False,
        shard_update: bool = False,
        overlap_param_gather: bool = False,
        wire_dtype: torch.dtype | None = None,
        learn_order: bool = False,
    ) -> None:
        super().__init__(
            module,
            mesh,
            placements,
            traffic,
            bucket_size_mb=bucket_size_mb,
            reduce_each_micro_batch=reduce_each_micro_batch,
            shard_update=shard_update,
            overlap_param_gather=overlap_param_gather,
            wire_dtype=wire_dtype,
        )
        self._views: list[Tensor] = [torch.empty(0)] * len(self._parameters)
        self._flat: list[Tensor] = []
        self._works: list[Travelling | None] = []
        self._exact: dict[int, Tensor] = {}
        self._earlier: list[Tensor | None] = []
        self._begin_buckets(learn=learn_order)

    def _lay_out(self) -> None:
        self._works = [None] * len(self._buckets)
        self._earlier = [None] * len(self._buckets)
        for bucket in self._buckets:
            members = [self._parameters[index] for index in bucket]
            flat = members[0].new_zeros(sum(parameter.numel() for parameter in members))
            self._flat.append(flat)
            parts = flat.split([parameter.numel() for parameter in members])
            for index, part, parameter in zip(bucket, parts, members, strict=True):
                self._views[index] = part.view(parameter.shape)
                if parameter.grad is not None:
                    # Bucket by bucket, so that gradients that were there before the cut are not held twice.
                    self._take(index)

    @torch.no_grad()
    def _take(self, index: int) -> None:
        parameter, view = self._parameters[index], self._views[index]
        if parameter.grad is view:
            return
        assert parameter.grad is not None
        view.copy_(parameter.grad)
        parameter.grad = view

    @torch.no_grad()
    def _start(self, number: int) -> None:
        for index in self._buckets[number]:
            if self._parameters[index].grad is None:
                # Not used in this step: its place still holds the gradient of an earlier one.
                self._parameters[index].grad = self._views[index].zero_()
            # Zero-bubble schedules add to ``.grad`` without calling hooks.
            self._take(index)
        flat = self._flat[number]
        if self._wire_dtype is None:
            self._works[number] = self._data_parallel.all_reduce(flat)
            return
        if number >= _BUFFERS_IN_FLIGHT:
            since = mark(self._device)
            self._go_on(number - _BUFFERS_IN_FLIGHT)
            self._stalled(since)
        if self._measuring:
            self._exact[number] = whole_sum(flat, self._data_parallel.group)
        self._works[number] = LowPrecisionSum(self._data_parallel, flat, self._wire_dtype)

    def _go_on(self, number: int) -> None:
        """A sum in low precision has two halves. The second begins at the same bucket on every rank, not when the first
        happens to have ended: collectives of one group must have one order."""
        work = self._works[number]
        if isinstance(work, LowPrecisionSum):
            work.go_on()

    def _complete(self, number: int) -> None:
        for started in range(number, len(self._buckets)):
            self._go_on(started)
        work, self._works[number] = self._works[number], None
        assert work is not None
        work.wait()
        if self._error is not None and (exact := self._exact.pop(number, None)) is not None:
            self._error.add(self._flat[number], exact)
        earlier = self._earlier[number]
        if earlier is not None:
            self._flat[number].add_(earlier)

    def _put_aside(self, number: int) -> None:
        flat, earlier = self._flat[number], self._earlier[number]
        self._earlier[number] = flat.clone() if earlier is None else earlier.copy_(flat)
        for index in self._buckets[number]:
            self._parameters[index].grad = None

    def _hand_out(self, update: ShardedUpdate) -> None:
        for parameter, part, (first, count) in zip(self._parameters, update.rows, update.ranges, strict=True):
            assert parameter.grad is not None
            part.grad = parameter.grad[first : first + count]

    def _drop(self) -> None:
        self._earlier = [None] * len(self._buckets)


class ReduceScatteredGradients(BucketedGradients):
    """Stage 2: of a reduced gradient, a rank keeps the rows it updates. Whole gradients live until their bucket has
    started; reduced with the last micro-batch alone, those of all micro-batches before it stay whole until then."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        placements: Mapping[str, Placement],
        traffic: Traffic,
        *,
        bucket_size_mb: float,
        reduce_each_micro_batch: bool = False,
        overlap_param_gather: bool = False,
        wire_dtype: torch.dtype | None = None,
        learn_order: bool = False,
    ) -> None:
        super().__init__(
            module,
            mesh,
            placements,
            traffic,
            bucket_size_mb=bucket_size_mb,
            reduce_each_micro_batch=reduce_each_micro_batch,
            shard_update=True,
            overlap_param_gather=overlap_param_gather,
            wire_dtype=wire_dtype,
        )
        self._shards = mesh.counted("dp_shard", traffic)
        assert self._shards.size > 1, "there is nothing to shard"
        self._scattering: list[tuple[Tensor, Tensor, Travelling] | None] = []
        self._summing: list[tuple[Tensor, Travelling | None] | None] = []
        self._sums: list[Tensor | None] = []
        self._exact: dict[int, Tensor] = {}
        # Whole gradients never outlive a micro-batch's backward where each is reduced, not even once.
        self._begin_buckets(learn=learn_order and not reduce_each_micro_batch)

    def _lay_out(self) -> None:
        assert self._update is not None
        self._layouts = self._update.layouts
        self._scattering = [None] * len(self._buckets)
        self._summing = [None] * len(self._buckets)
        self._sums = [None] * len(self._buckets)

    def _take(self, index: int) -> None:
        """It stays where autograd put it until its bucket starts."""

    @torch.no_grad()
    def _start(self, number: int) -> None:
        if number >= _BUFFERS_IN_FLIGHT:
            since = mark(self._device)
            self._scattered(number - _BUFFERS_IN_FLIGHT)
            self._stalled(since)
        layout = self._layouts[number]
        members = [self._parameters[index] for index in self._buckets[number]]
        gradients = [parameter.grad for parameter in members]
        if self._measuring:
            exact = members[0].new_empty(layout.parts, layout.share)
            layout.copy_in(gradients, exact)
            self._exact[number] = scatter_sum(exact, self._shards.group)
        buffer = members[0].new_empty(layout.parts, layout.share, dtype=self._wire_dtype)
        with nullcontext() if self._wire_dtype is None else packing(self._wire_dtype):
            layout.copy_in(gradients, buffer)
        for parameter in members:
            parameter.grad = None
        del gradients
        share = members[0].new_empty(layout.share)
        work: Travelling = (
            self._shards.reduce_scatter(share, buffer)
            if self._wire_dtype is None
            else LowPrecisionScatter(self._shards, share, buffer)
        )
        self._scattering[number] = share, buffer, work

    def _scattered(self, number: int) -> None:
        """The sum over the ranks that share a bucket is there; on to those that hold the same share."""
        if (started := self._scattering[number]) is None:
            return
        self._scattering[number] = None
        share, _, work = started
        work.wait()
        if self._error is not None and (exact := self._exact.pop(number, None)) is not None:
            self._error.add(share, exact)
        self._summing[number] = share, self._replicas.all_reduce(share) if self._replicas.size > 1 else None

    def _complete(self, number: int) -> None:
        # All buckets that are left are sent on before the first of them is waited for.
        for started in range(number, len(self._buckets)):
            self._scattered(started)
        summing, self._summing[number] = self._summing[number], None
        assert summing is not None
        share, work = summing
        if work is not None:
            work.wait()
        earlier = self._sums[number]
        self._sums[number] = share if earlier is None else earlier.add_(share)

    def _put_aside(self, number: int) -> None:
        """It is: the whole gradients of the next micro-batch are other tensors."""

    def _hand_out(self, update: ShardedUpdate) -> None:
        for bucket, layout, total in zip(self._buckets, self._layouts, self._sums, strict=True):
            assert total is not None
            parts = [update.rows[index] for index in bucket]
            views = layout.views(total, [part.shape for part in parts])
            for part, view in zip(parts, views, strict=True):
                part.grad = view

    def _drop(self) -> None:
        self._sums = [None] * len(self._buckets)
