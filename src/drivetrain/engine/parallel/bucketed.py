"""Gradients in buckets: when a bucket starts to travel, when a step is complete, and what the optimizer sees.

Common to the ZeRO stages 0 to 2 (:mod:`drivetrain.engine.parallel.zero`), which differ in how a bucket is reduced. A
hook tells that a parameter's gradient is there. A bucket starts to travel when it is complete and the one before it has
started, so that all ranks start them in the same order.

Buckets are cut by the order in which the first backward pass finishes gradients
(:mod:`drivetrain.engine.parallel.readiness`), so that this one pass is reduced when it has ended. They are cut by
registration, from the start, where that is not wanted: nothing travels during backward in a pipeline, and whoever
reduces with each micro-batch must never hold all gradients at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from drivetrain.engine.parallel.buckets import buckets_of, order_of_registration
from drivetrain.engine.parallel.gradient_sync import Held, kept_buffers
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.parameter_gather import OverlappedGather
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.readiness import Arrivals, agreed_order
from drivetrain.engine.parallel.sharded_update import ShardedUpdate
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.parallel.wire import WireError
from drivetrain.engine.timing import Mark, mark

__all__ = ["BucketedGradients"]


class BucketedGradients(ABC):
    """What the stages have in common. A subclass calls :meth:`_begin_buckets` when it is built."""

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
        overlap_param_gather: bool,
        wire_dtype: torch.dtype | None,
    ) -> None:
        """
        Args:
            module: its parameters are this rank's, of one dtype. A tied one counts once, under its first name.
            placements: of its parameters over the other dimensions (tensor parallelism ...); whole where absent.
            bucket_size_mb: MB (1e6 bytes) of gradients in a bucket; 0: all in one, which starts after backward.
            reduce_each_micro_batch: gradients travel with each micro-batch instead of the last one alone.
            shard_update: this rank updates its rows only (stages 1 and 2).
            overlap_param_gather: updated rows travel while the next forward pass begins; needs ``shard_update``.
            wire_dtype: that gradients have while they travel; None: their own.
        """
        named = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
        assert len({parameter.dtype for _, parameter in named}) == 1, "parameters of several dtypes"
        assert not kept_buffers(module), "buffers are not kept equal over the ranks"
        self.traffic = traffic
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._sizes = [parameter.nbytes for parameter in self._parameters]
        self._device = self._parameters[0].device
        self._data_parallel = mesh.counted("dp", traffic)
        self._replicas = mesh.counted("dp_replicate", traffic)
        self._each = reduce_each_micro_batch
        self._bucket_size_mb = bucket_size_mb
        self._buckets: list[list[int]] = []
        self._bucket_of = [0] * len(named)
        self._arrivals = Arrivals(len(named))
        self._wire_dtype = wire_dtype if self._data_parallel.size > 1 else None
        self._error = WireError() if self._wire_dtype is not None else None
        self._measuring = self._error is not None
        self._base = {
            name: placements.get(name, Placement(tuple(parameter.shape))) for name, parameter in named
        }
        self._update: ShardedUpdate | None = None
        self._behind: OverlappedGather | None = None
        if shard_update:
            self._update = ShardedUpdate(
                named,
                mesh.counted("dp_shard", traffic),
                mesh.index("dp_shard"),
                {name: place.replicated_over("dp_replicate") for name, place in self._base.items()},
            )
            if overlap_param_gather:
                self._behind = OverlappedGather(self._update, module, self._parameters)
        self._ready: Mark | None = None
        self._done: Mark | None = None
        self._stalled_s = 0.0
        self._travelling = False
        self._begin()

    def _begin_buckets(self, *, learn: bool) -> None:
        """Watch gradients from now on; buckets are cut now, or when a first backward pass has shown an order."""
        if self._data_parallel.size == 1:
            return
        by_registration = order_of_registration(len(self._parameters))
        if not learn or len(buckets_of(self._sizes, self._bucket_size_mb, by_registration)) == 1:
            self._cut(by_registration)
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(_Hook(self, index))

    def _cut(self, order: Sequence[int]) -> None:
        """Cut the buckets, for good."""
        self._buckets = buckets_of(self._sizes, self._bucket_size_mb, order)
        for number, bucket in enumerate(self._buckets):
            for index in bucket:
                self._bucket_of[index] = number
        if self._update is not None:
            self._update.lay_out(self._buckets)
        if self._behind is not None:
            self._behind.lay_out(self._buckets)
        self._lay_out()
        self._begin()

    def _begin(self) -> None:
        """Nothing of the coming micro-batch has been seen."""
        self._seen = [False] * len(self._parameters)
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters whose gradients travel together, in the order of travelling; empty as long as it is
        not known."""
        return [[self._names[index] for index in bucket] for bucket in self._buckets]

    def gradient_is_there(self, index: int) -> None:
        """Autograd has added this micro-batch's gradient to parameter ``index``."""
        if not self._buckets:
            self._arrivals.note(index)
            return
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
        if self._behind is not None and self._behind.waits_before_forward:
            self.settle()
        self._travelling = self._data_parallel.size > 1 and (last or self._each)
        yield
        if self._travelling and not last:
            self._reduce_all(final=False)
        # With the last one, whatever is left to do is waited for in ``finish``.

    def finish(self) -> None:
        """Start what has not been started, and wait for everything."""
        # Where some part of the model was not used, its rows may still travel; the update writes into them.
        self.settle()
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
        ended = None
        if not self._buckets:
            ended = mark(self._device)
            group = self._data_parallel.group
            assert group is not None, "one rank has nothing to reduce"
            self._cut(agreed_order(self._arrivals.order(), group))
        while self._next < len(self._buckets):
            self._start_next()
        if ended is not None:
            # All of it was waited for from there on, buffers in use included.
            self._ready, self._stalled_s = ended, 0.0
        for number in range(len(self._buckets)):
            self._complete(number)
            if not final:
                self._put_aside(number)
        self._measuring = False
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

    def wire_error(self) -> float | None:
        """See :meth:`GradientSync.wire_error`."""
        return None if self._error is None else self._error.relative(self._data_parallel.group)

    def settle(self) -> None:
        """Return when the parameters are those of the latest step."""
        if self._behind is not None:
            self._behind.settle()

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
        self.settle()
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
        """Update, gather or begin to, and drop the gradients."""
        optimizer.step()
        # Before the buffers of gathers are made: at stage 2 nothing is left of the gradients then.
        self.skip(optimizer)
        if self._behind is not None:
            self._behind.start()
        elif self._update is not None:
            self._update.gather()

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients."""
        optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters:
            parameter.grad = None
        self._drop()

    @abstractmethod
    def _lay_out(self) -> None:
        """The buckets are cut: make what belongs to each of them."""

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

    def __init__(self, owner: BucketedGradients, index: int) -> None:
        self._owner = owner
        self._index = index

    def __call__(self, _parameter: Tensor) -> None:
        self._owner.gradient_is_there(self._index)
