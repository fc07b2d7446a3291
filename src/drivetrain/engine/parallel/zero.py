"""ZeRO stages 0 to 2 over plain parameters: gradients travel in buckets while backward still computes.

Rajbhandari et al. 2020 (arXiv:1910.02054): stage 0 replicates everything, stage 1 shards the moments, stage 2 the
gradients too. What is resident where is stated in :mod:`drivetrain.engine.parallel.resident`.

A hook tells that a parameter's gradient is there. A bucket starts to travel when it is complete and the one before it
has started, so that all ranks start them in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.engine.parallel.buckets import buckets_of
from drivetrain.engine.parallel.flat_collectives import CountedGroup
from drivetrain.engine.parallel.gradient_sync import Held, kept_buffers
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.sharded_update import ShardedUpdate
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.timing import Mark, mark

__all__ = ["AllReducedGradients", "ReduceScatteredGradients"]

_BUFFERS_IN_FLIGHT = 2
"""Buckets that are being reduce-scattered at once. More would only wait in the same queue, and hold memory."""


class _Bucketed(ABC):
    """What the stages have in common: when a bucket starts, when a step is complete, and what the optimizer sees."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        placements: Mapping[str, Placement],
        traffic: Traffic,
        *,
        bucket_size_mb: float,
        reduce_each_micro_batch: bool,
        shard_update: bool,
    ) -> None:
        """
        Args:
            module: its parameters are this rank's, of one dtype. A tied one counts once, under its first name.
            placements: of its parameters over the other dimensions (tensor parallelism ...); whole where absent.
            bucket_size_mb: MB (1e6 bytes) of gradients in a bucket; 0: all in one, which starts after backward.
            reduce_each_micro_batch: gradients travel with each micro-batch instead of the last one alone.
            shard_update: this rank updates its rows only (stages 1 and 2).
        """
        named = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
        assert len({parameter.dtype for _, parameter in named}) == 1, "parameters of several dtypes"
        assert not kept_buffers(module), "buffers are not kept equal over the ranks"
        self.traffic = traffic
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._device = self._parameters[0].device
        self._data_parallel = CountedGroup(mesh.group("dp"), "dp", traffic)
        self._replicas = CountedGroup(mesh.group("dp_replicate"), "dp_replicate", traffic)
        self._each = reduce_each_micro_batch
        self._buckets = buckets_of([parameter.nbytes for parameter in self._parameters], bucket_size_mb)
        self._base = {
            name: placements.get(name, Placement(tuple(parameter.shape))) for name, parameter in named
        }
        self._update = (
            ShardedUpdate(
                named,
                self._buckets,
                CountedGroup(mesh.group("dp_shard"), "dp_shard", traffic),
                mesh.index("dp_shard"),
                {name: place.replicated_over("dp_replicate") for name, place in self._base.items()},
            )
            if shard_update
            else None
        )
        self._bucket_of = [0] * len(named)
        for number, bucket in enumerate(self._buckets):
            for index in bucket:
                self._bucket_of[index] = number
        self._ready: Mark | None = None
        self._done: Mark | None = None
        self._stalled_s = 0.0
        self._travelling = False
        self._begin()
        if self._data_parallel.size > 1:
            for index, parameter in enumerate(self._parameters):
                parameter.register_post_accumulate_grad_hook(self._hook_of(index))

    def _begin(self) -> None:
        """Nothing of the coming micro-batch has been seen."""
        self._seen = [False] * len(self._parameters)
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0

    def _hook_of(self, index: int) -> "_Hook":
        return _Hook(self, index)

    def gradient_is_there(self, index: int) -> None:
        """Autograd has added this micro-batch's gradient to parameter ``index``."""
        self._take(index)
        if not self._travelling:
            return
        assert not self._seen[index], f"{self._names[index]} got its gradient twice in one micro-batch"
        self._seen[index] = True
        self._missing[self._bucket_of[index]] -= 1
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._start_next()

    def _start_next(self) -> None:
        number = self._next
        self._next += 1
        if self._next == len(self._buckets):
            # Backward may still have something to do (the gradient of an input), but nothing that is waited for.
            self._ready = mark(self._device)
        self._start(number)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch."""
        self._travelling = self._data_parallel.size > 1 and (last or self._each)
        yield
        if self._travelling and not last:
            self._reduce_all(final=False)
        # With the last one, whatever is left to do is waited for in ``finish``.

    def finish(self) -> None:
        """Start what has not been started, and wait for everything."""
        if self._data_parallel.size > 1:
            self._reduce_all(final=True)
            self._done = mark(self._device)
            if isinstance(self._ready, float):
                self._ready -= self._stalled_s
            self._stalled_s = 0.0
        if self._update is not None:
            self._hand_out(self._update)

    @torch.no_grad()
    def _reduce_all(self, *, final: bool) -> None:
        while self._next < len(self._buckets):
            self._start_next()
        for number in range(len(self._buckets)):
            self._complete(number)
            if not final:
                self._put_aside(number)
        if not final and self._ready is not None:
            self._stalled(self._ready)
        self._begin()
        self._travelling = False

    def _stalled(self, since: Mark) -> None:
        """Something was waited for before the last gradient was there, up to now."""
        now = mark(self._device)
        if isinstance(since, float) and isinstance(now, float):
            self._stalled_s += now - since

    def exposed_wait(self) -> tuple[Mark, Mark] | None:
        """From the last gradient's being ready to the end of the last reduction.

        On a CPU the first mark is set earlier by what was waited for earlier: reductions of earlier micro-batches,
        and buffers that were still in use. On CUDA these waits are the stream's and are not in it.
        """
        return None if self._ready is None or self._done is None else (self._ready, self._done)

    def updated(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Parameters at stage 0, rows of them from stage 1 on; in the order of the module."""
        updated = self._parameters if self._update is None else self._update.rows
        return list(zip(self._names, updated, strict=True))

    def placements(self) -> Mapping[str, Placement]:
        """Where what the optimizer updates lies."""
        if self._update is not None:
            return self._update.placements
        return {name: place.replicated_over("dp") for name, place in self._base.items()}

    def gradients(self) -> Mapping[str, Held]:
        """Of what the optimizer updates."""
        placements, found = self.placements(), {}
        for name, parameter in self.updated():
            assert parameter.grad is not None, f"{name} has no gradient: finish() comes first"
            found[name] = Held(parameter.grad, placements[name])
        return found

    def parameters(self) -> Mapping[str, Held]:
        """Whole over data-parallel ranks at every stage."""
        return {
            name: Held(parameter.data, self._base[name].replicated_over("dp"))
            for name, parameter in zip(self._names, self._parameters, strict=True)
        }

    def moments(self, optimizer: torch.optim.Optimizer) -> Mapping[str, Held]:
        """Tensors of the optimizer's state that are shaped as what it updates."""
        placements = self.placements()
        return {
            f"{name}/{key}": Held(value, placements[name])
            for name, parameter in self.updated()
            for key, value in optimizer.state[parameter].items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update, gather, and drop the gradients."""
        optimizer.step()
        if self._update is not None:
            self._update.gather()
        optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters:
            parameter.grad = None
        self._drop()

    @abstractmethod
    def _take(self, index: int) -> None:
        """Put the gradient of a parameter where the reduction wants it."""

    @abstractmethod
    def _start(self, number: int) -> None:
        """Begin to reduce a bucket."""

    @abstractmethod
    def _complete(self, number: int) -> None:
        """Wait for a bucket, and add what was reduced with earlier micro-batches."""

    @abstractmethod
    def _put_aside(self, number: int) -> None:
        """Keep a bucket's sum from being mixed with the next micro-batch's gradient."""

    @abstractmethod
    def _hand_out(self, update: ShardedUpdate) -> None:
        """Give the rows that the optimizer updates their gradients."""

    @abstractmethod
    def _drop(self) -> None:
        """Forget what belongs to this step alone."""


class _Hook:
    """Called with the parameter, knows its number. An object of its own: a lambda in a loop would bind the last."""

    def __init__(self, owner: _Bucketed, index: int) -> None:
        self._owner = owner
        self._index = index

    def __call__(self, _parameter: Tensor) -> None:
        self._owner.gradient_is_there(self._index)


class AllReducedGradients(_Bucketed):
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
    ) -> None:
        super().__init__(
            module,
            mesh,
            placements,
            traffic,
            bucket_size_mb=bucket_size_mb,
            reduce_each_micro_batch=reduce_each_micro_batch,
            shard_update=shard_update,
        )
        self._views: list[Tensor] = [torch.empty(0)] * len(self._parameters)
        self._flat: list[Tensor] = []
        self._works: list[dist.Work | None] = [None] * len(self._buckets)
        self._earlier: list[Tensor | None] = [None] * len(self._buckets)
        if self._data_parallel.size == 1:
            return
        for bucket in self._buckets:
            members = [self._parameters[index] for index in bucket]
            flat = members[0].new_zeros(sum(parameter.numel() for parameter in members))
            self._flat.append(flat)
            parts = flat.split([parameter.numel() for parameter in members])
            for index, part, parameter in zip(bucket, parts, members, strict=True):
                self._views[index] = part.view(parameter.shape)

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
        self._works[number] = self._data_parallel.all_reduce(self._flat[number])

    def _complete(self, number: int) -> None:
        work, self._works[number] = self._works[number], None
        assert work is not None
        work.wait()
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


class ReduceScatteredGradients(_Bucketed):
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
    ) -> None:
        super().__init__(
            module,
            mesh,
            placements,
            traffic,
            bucket_size_mb=bucket_size_mb,
            reduce_each_micro_batch=reduce_each_micro_batch,
            shard_update=True,
        )
        assert self._update is not None
        self._layouts = self._update.layouts
        self._shards = CountedGroup(mesh.group("dp_shard"), "dp_shard", traffic)
        assert self._shards.size > 1, "there is nothing to shard"
        self._scattering: list[tuple[Tensor, Tensor, dist.Work] | None] = [None] * len(self._buckets)
        self._summing: list[tuple[Tensor, dist.Work | None] | None] = [None] * len(self._buckets)
        self._sums: list[Tensor | None] = [None] * len(self._buckets)

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
        buffer = members[0].new_empty(layout.parts, layout.share)
        layout.copy_in([parameter.grad for parameter in members], buffer)
        for parameter in members:
            parameter.grad = None
        share = buffer.new_empty(layout.share)
        self._scattering[number] = share, buffer, self._shards.reduce_scatter(share, buffer)

    def _scattered(self, number: int) -> None:
        """The sum over the ranks that share a bucket is there; on to those that hold the same share."""
        if (started := self._scattering[number]) is None:
            return
        self._scattering[number] = None
        share, _, work = started
        work.wait()
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
