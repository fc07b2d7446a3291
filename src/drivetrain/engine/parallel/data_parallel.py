"""Plain data parallelism: every rank holds the whole model, gradients are summed while backward runs.

Torch's DistributedDataParallel does the bucketing. Two things differ from its defaults: gradients are
*summed*, because the loss is already divided by the number of valid tokens of all ranks; and the time
for which backward had nothing left to do but wait for the network is measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.parallel.process_group import ProcessGroup
from drivetrain.engine.timing import Mark, mark

__all__ = ["DataParallel", "ExposedWait"]

_MB_IN_MIB = 1e6 / 2**20


class _LossOf(nn.Module):
    """DistributedDataParallel works on ``forward``, and what we differentiate is the loss."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.decoder.loss_sum(batch)


class ExposedWait:
    """Time between the last gradient's being ready and backward's return, in seconds.

    On CUDA the compute stream waits for the communication before backward is over, so two marks on it
    tell the same; they are read when the step's other figures are, and nothing synchronises before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ready: Mark | None = None
        self._done: Mark | None = None

    def last_gradient_ready(self) -> None:
        """The last bucket is full: from here on there is no backward work left."""
        self._ready = mark(self._device)

    def backward_returned(self) -> None:
        """Every gradient is reduced."""
        self._done = mark(self._device)

    def take(self) -> tuple[Mark, Mark]:
        """Both marks of the latest backward that communicated."""
        assert self._ready is not None
        assert self._done is not None
        return self._ready, self._done


class DataParallel:
    """Losses and gradients of a decoder over all ranks of ``group``; transparent for a single rank."""

    def __init__(
        self, decoder: Decoder, group: ProcessGroup, device: torch.device, bucket_size_mb: float
    ) -> None:
        self._loss_of = _LossOf(decoder)
        self.exposed_wait: ExposedWait | None = None
        self._wrapped: DistributedDataParallel | None = None
        if group.size > 1:
            self.exposed_wait = ExposedWait(device)
            self._wrapped = DistributedDataParallel(
                self._loss_of,
                bucket_cap_mb=bucket_size_mb * _MB_IN_MIB,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
            )
            self._wrapped.register_comm_hook(self.exposed_wait, _sum_bucket)

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Sum of the cross-entropy over this rank's valid tokens, fp32 scalar."""
        forward = self._loss_of if self._wrapped is None else self._wrapped
        loss = forward(batch)
        assert isinstance(loss, torch.Tensor)
        return loss

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch: gradients travel with the last one only."""
        quiet = self._wrapped is not None and not last
        with self._wrapped.no_sync() if quiet and self._wrapped is not None else nullcontext():
            yield
        if last and self.exposed_wait is not None:
            self.exposed_wait.backward_returned()


def _sum_bucket(wait: ExposedWait, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if bucket.is_last():
        wait.last_gradient_ready()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(_first_of)
    return future


def _first_of(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]
