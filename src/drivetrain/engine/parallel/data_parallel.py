"""Plain data parallelism: every rank holds the whole model, gradients are summed while backward runs.

Torch's DistributedDataParallel does the bucketing. It averages over the ranks, and our loss is divided by
the number of valid tokens of *all* ranks already: so the loss that is differentiated is scaled up by the
number of ranks, which makes the average a sum. What is added here is the time for which backward had
nothing left to do but wait for the network.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.parallel.fully_sharded import FullySharded
from drivetrain.engine.parallel.gradient_sync import GradientSync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.process_group import ProcessGroup
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.parallel.zero import AllReducedGradients, ReduceScatteredGradients
from drivetrain.engine.timing import Mark, mark

__all__ = ["DataParallel", "ExposedWait", "gradient_sync"]

_MB_IN_MIB = 1e6 / 2**20
_ONE_BUCKET_MIB = 2**40
"""More than any gradients: a bucket of this size holds all of them."""


class _LossOf(nn.Module):
    """DistributedDataParallel works on ``forward``, and what we differentiate is the loss."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.decoder.loss_sum(batch)


class ExposedWait:
    """Time between the last gradient's being ready and backward's return.

    Which parameter gets its gradient last is learned in the first backward pass; from then on one hook on
    that parameter is all it costs. On CUDA the compute stream waits for the communication before backward
    is over, so two marks on it tell the same; they are read when the step's other figures are, and nothing
    synchronises before.
    """

    def __init__(self, decoder: nn.Module, device: torch.device) -> None:
        self._device = device
        self._ready: Mark | None = None
        self._done: Mark | None = None
        self._latest: nn.Parameter | None = None
        self._hooks = {
            parameter: parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)
            for parameter in decoder.parameters()
        }

    def _gradient_is_ready(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._latest = parameter
        self._ready = mark(self._device)

    def backward_returned(self) -> None:
        """Every gradient is reduced."""
        self._done = mark(self._device)
        if len(self._hooks) > 1 and self._latest is not None:
            for parameter, hook in self._hooks.items():
                if parameter is not self._latest:
                    hook.remove()
            self._hooks = {self._latest: self._hooks[self._latest]}

    def take(self) -> tuple[Mark, Mark]:
        """Both marks of the latest backward that communicated."""
        assert self._ready is not None
        assert self._done is not None
        return self._ready, self._done


class DataParallel:
    """Losses and gradients of a decoder over all ranks of ``group``; transparent for a single rank."""

    def __init__(
        self, decoder: Decoder, group: ProcessGroup, device: torch.device, bucket_size_mb: float | None
    ) -> None:
        """``bucket_size_mb`` is in MB (1e6 bytes); None: all gradients in one bucket, which is reduced once the last
        of them is there."""
        self._loss_of = _LossOf(decoder)
        self._num_ranks = group.size
        self.exposed_wait: ExposedWait | None = None
        self._wrapped: DistributedDataParallel | None = None
        if group.size > 1:
            assert not list(decoder.buffers()), "buffers would be broadcast at every step"
            self.exposed_wait = ExposedWait(decoder, device)
            bucket_mib = _ONE_BUCKET_MIB if bucket_size_mb is None else bucket_size_mb * _MB_IN_MIB
            self._wrapped = DistributedDataParallel(
                self._loss_of, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True
            )

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Sum of the cross-entropy over this rank's valid tokens, fp32 scalar."""
        forward = self._loss_of if self._wrapped is None else self._wrapped
        loss = forward(batch)
        assert isinstance(loss, torch.Tensor)
        return loss

    def backward(self, loss_sum: torch.Tensor, valid_tokens: int) -> None:
        """Gradients of ``loss_sum`` over ``valid_tokens`` of all ranks, summed over the ranks."""
        (loss_sum * (self._num_ranks / max(valid_tokens, 1))).backward()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch: gradients travel with the last one only."""
        quiet = self._wrapped is not None and not last
        with self._wrapped.no_sync() if quiet and self._wrapped is not None else nullcontext():
            yield
        if last and self.exposed_wait is not None:
            self.exposed_wait.backward_returned()


def gradient_sync(
    module: nn.Module,
    mesh: Mesh,
    traffic: Traffic,
    *,
    zero_stage: int,
    placements: Mapping[str, Placement] | None = None,
    bucket_size_mb: float = 25.0,
    reduce_each_micro_batch: bool = False,
    blocks: Sequence[nn.Module] = (),
    forward_methods: Sequence[str] = ("loss_sum",),
    reshard_after_forward: bool = True,
) -> GradientSync:
    """Data parallelism of a ZeRO stage over ``dp``, sharded over ``dp_shard``, for ``module`` with its weights in it.

    Where a single rank would hold all shards (``dp_shard`` of size 1) there is nothing to shard, and every stage is
    stage 0.

    Args:
        zero_stage: 0 to 3.
        placements: of the parameters over the other dimensions of the mesh; whole where absent.
        bucket_size_mb: MB (1e6 bytes), stages 0 to 2; 0: all gradients in one bucket, reduced after backward.
        blocks, forward_methods, reshard_after_forward: stage 3, see :class:`FullySharded`.
    """
    placements = placements or {}
    if zero_stage in (2, 3) and mesh.size("dp_shard") > 1:
        if zero_stage == 3:
            return FullySharded(
                module,
                blocks,
                mesh,
                placements,
                traffic,
                forward_methods=forward_methods,
                reshard_after_forward=reshard_after_forward,
                reduce_each_micro_batch=reduce_each_micro_batch,
            )
        return ReduceScatteredGradients(
            module,
            mesh,
            placements,
            traffic,
            bucket_size_mb=bucket_size_mb,
            reduce_each_micro_batch=reduce_each_micro_batch,
        )
    return AllReducedGradients(
        module,
        mesh,
        placements,
        traffic,
        bucket_size_mb=bucket_size_mb,
        reduce_each_micro_batch=reduce_each_micro_batch,
        shard_update=zero_stage >= 1 and mesh.size("dp_shard") > 1,
    )
