"""One optimizer step: the arithmetic of training, and the figures it leaves behind.

Nothing here reads a device value on the host, but in fp16 whether gradients overflowed; losses and norms stay tensors
until the recorder asks.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.profiler import record_function

from drivetrain.engine.memory.offload_copies import CopyEngine, Moved
from drivetrain.engine.memory.offload_embedding import EmbeddingOffload
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.optimizer import set_learning_rate
from drivetrain.engine.parallel.gradient_norm import clip_held_gradients
from drivetrain.engine.parallel.gradient_sync import GradientSync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline import Pipeline
from drivetrain.engine.parallel.process_group import PendingSum, ProcessGroup
from drivetrain.engine.precision import LossScaler, look_for_overflow
from drivetrain.engine.timing import Mark, mark

__all__ = ["StepFigures", "Stepper"]


@dataclass(frozen=True)
class StepFigures:
    """What one step did. Tensors are on the device and may not be computed yet.

    Attributes:
        loss_sum: cross-entropy summed over this rank's valid tokens, fp32 scalar; 0 on all but one of the ranks
            that hold one model together, so that the sum over all ranks counts each token once.
        grad_norm: global gradient norm before clipping, fp32 scalar; not a number where the step was skipped.
        clip_coefficient: factor the gradients were scaled by, fp32 scalar; as the norm.
        valid_tokens, tokens, sum_squared_lengths: totals over all ranks.
        stop_votes: ranks that were asked to stop.
        data_wait_s: host seconds this rank waited for its batches.
        started: the device's clock at the start of the step.
        exposed_wait: marks around the wait for gradients; None where there is none, it is not known, or every wait is
            (``traffic.flights``).
        fused_calls: of torch's fused operators over symmetric memory; None where they are not used.
        communicated: bytes that this rank handed to the collectives of each dimension of the mesh during the step.
        offloaded: what was copied between device and host memory; None where nothing is offloaded.
        loss_scale: factor of the loss that was differentiated; None: there is no scaling.
        skipped: gradients overflowed, and nothing was updated.
        skipped_steps: of the run up to this step.
    """

    loss_sum: torch.Tensor
    grad_norm: torch.Tensor
    clip_coefficient: torch.Tensor
    valid_tokens: int
    tokens: int
    sum_squared_lengths: int
    stop_votes: int
    learning_rate: float
    data_wait_s: float
    started: Mark
    exposed_wait: tuple[Mark, Mark] | None
    fused_calls: int | None = None
    communicated: Mapping[str, int] = field(default_factory=dict)
    offloaded: Moved | None = None
    loss_scale: float | None = None
    skipped: bool = False
    skipped_steps: int = 0


@dataclass(frozen=True)
class Stepper:
    """Everything one step needs.

    Attributes:
        loss_scaler: scales the loss, and has steps skipped whose gradients overflow; None: neither is done.
        offload: copies between device and host memory; None: nothing is offloaded.
        embedding: is told of each micro-batch before its turn; None: the embedding is on the device.
    """

    decoder: Decoder
    sync: GradientSync
    optimizer: torch.optim.Optimizer
    group: ProcessGroup
    mesh: Mesh
    device: torch.device
    num_microbatches: int
    max_norm: float
    pipeline: Pipeline | None
    loss_scaler: LossScaler | None = None
    offload: CopyEngine | None = None
    embedding: EmbeddingOffload | None = None

    def step(
        self,
        batches: Iterator[Batch],
        learning_rate: float,
        *,
        stop_requested: bool,
        on_gradients: Callable[[], None] | None = None,
    ) -> StepFigures:
        """Fetch, forward, backward, clip, update.

        The loss of each micro-batch is divided by the number of valid tokens of the *whole* global batch,
        so that neither the number of ranks nor the micro-batch split changes the gradient.

        With a loss scaler the gradient of the scaled loss is what autograd makes and what travels; from there on it is
        the gradient again. Where any of it on any rank is not finite, no rank updates anything.

        Args:
            on_gradients: called when this rank holds its part of the gradient of the whole global batch, not clipped
                yet; not where the step is skipped.
        """
        started = mark(self.device)
        flights = self.sync.traffic.flights
        if flights is not None:
            flights.begin_step()
        # Evaluations and probes between steps are counted, too.
        before_step = self.sync.traffic.bytes_by_group()
        fused = self.sync.traffic.fused_calls
        if fused is not None:
            fused.begin_step()
        with record_function("drivetrain/fetch"):
            before = time.perf_counter()
            micro_batches = [next(batches) for _ in range(self.num_microbatches)]
            data_wait_s = time.perf_counter() - before
        # Ranks that hold one model together have the same batches: the first of them counts for all.
        counted = micro_batches if self.mesh.is_first_of_model else []
        totals = self.group.start_sum(
            [
                sum(batch.num_valid_tokens for batch in counted),
                sum(batch.token_ids.numel() for batch in counted),
                sum(batch.sum_squared_lengths for batch in counted),
                int(stop_requested),
            ]
        )
        set_learning_rate(self.optimizer, learning_rate)
        loss_scale = self._begin_scaling(micro_batches)
        loss_sum, counts = self._forward_and_backward(micro_batches, totals)
        if flights is not None:
            flights.end_backward()
        with record_function("drivetrain/backward"):
            self.sync.finish()
        skipped = self.loss_scaler is not None and self._overflowed(self.loss_scaler, loss_sum)
        if on_gradients is not None and not skipped:
            on_gradients()
        with record_function("drivetrain/optimizer"):
            if skipped:
                self.sync.skip(self.optimizer)
                grad_norm = clip_coefficient = torch.full_like(loss_sum, torch.nan)
            else:
                grad_norm, clip_coefficient = clip_held_gradients(
                    self.sync.gradients(), self.max_norm, self.mesh, self.sync.traffic
                )
                self.sync.step(self.optimizer)
        return StepFigures(
            loss_sum=loss_sum if self.mesh.is_first_of_model else torch.zeros_like(loss_sum),
            grad_norm=grad_norm,
            clip_coefficient=clip_coefficient,
            valid_tokens=counts[0],
            tokens=counts[1],
            sum_squared_lengths=counts[2],
            stop_votes=counts[3],
            learning_rate=learning_rate,
            data_wait_s=data_wait_s,
            started=started,
            exposed_wait=self._exposed_wait(),
            offloaded=None if self.offload is None else self.offload.take(),
            fused_calls=None if fused is None else fused.end_step(self.num_microbatches),
            communicated={
                group: total - before_step.get(group, 0)
                for group, total in self.sync.traffic.bytes_by_group().items()
            },
            loss_scale=loss_scale,
            skipped=skipped,
            skipped_steps=0 if self.loss_scaler is None else self.loss_scaler.skipped_steps,
        )

    def _begin_scaling(self, micro_batches: Sequence[Batch]) -> float | None:
        """The scale of this step; None where the loss is not scaled.

        The head computes gradients in forward already, when the valid tokens of all ranks are not known yet: they are
        at most all tokens.
        """
        if self.loss_scaler is None:
            return None
        tokens = sum(batch.token_ids.numel() for batch in micro_batches) * self.mesh.size("dp")
        self.decoder.head.gradient_scale = 2.0 ** math.floor(math.log2(self.loss_scaler.scale / tokens))
        return self.loss_scaler.scale

    def _overflowed(self, scaler: LossScaler, loss_sum: torch.Tensor) -> bool:
        """Take the scale out of the gradients again; whether they overflowed, the same on every rank."""
        with record_function("drivetrain/unscale"):
            overflow = look_for_overflow(self.sync.gradients(), loss_sum, scaler.scale, self.group)
        scaler.update(overflow=overflow.found, finite_loss=overflow.finite_loss)
        return overflow.found

    def _exposed_wait(self) -> tuple[Mark, Mark] | None:
        """The wait for gradients, where it is all that this rank waits for: ranks that hold one model together wait for
        each other in every layer. None where flights tell of every wait."""
        if self.sync.traffic.flights is not None:
            return None
        alone = self.mesh.size("tp") == self.mesh.size("cp") == self.mesh.size("pp") == 1
        return self.sync.exposed_wait() if alone else None

    def _forward_and_backward(
        self, micro_batches: Sequence[Batch], totals: PendingSum
    ) -> tuple[torch.Tensor, list[int]]:
        """Sum of the loss over this rank's batches, and the totals over all ranks."""
        if self.pipeline is not None:
            return self._through_pipeline(self.pipeline, micro_batches, totals)
        loss_sum = torch.zeros((), dtype=torch.float32, device=self.device)
        counts: list[int] = []
        flights = self.sync.traffic.flights
        if self.embedding is not None:
            self.embedding.announce(micro_batches[0])
        for index, host_batch in enumerate(micro_batches):
            with record_function("drivetrain/h2d"):
                batch = host_batch.to(self.device)
            last = index == self.num_microbatches - 1
            if self.embedding is not None:
                self.embedding.arrived(host_batch, batch)
                if not last:
                    self.embedding.announce(micro_batches[index + 1])
            with self.sync.micro_batch(last=last):
                with record_function("drivetrain/forward"):
                    loss = self.decoder.loss_sum(batch)
                if not counts:
                    with record_function("drivetrain/sync"):
                        counts = totals.wait()
                if last and flights is not None:
                    flights.begin_backward()
                with record_function("drivetrain/backward"):
                    self.backward(loss, counts[0])
            loss_sum += loss.detach()
        return loss_sum, counts

    def _through_pipeline(
        self, pipeline: Pipeline, micro_batches: Sequence[Batch], totals: PendingSum
    ) -> tuple[torch.Tensor, list[int]]:
        with record_function("drivetrain/h2d"):
            batches = [batch.to(self.device) for batch in micro_batches]
        with record_function("drivetrain/sync"):
            counts = totals.wait()
        # Whole gradients are there when the schedule has ended: nothing may travel before.
        with self.sync.micro_batch(last=False), record_function("drivetrain/pipeline"):
            loss_sum = pipeline.run(batches, counts[0], loss_scale=self._loss_scale)
        return loss_sum, counts

    def backward(self, loss_sum: torch.Tensor, valid_tokens: int) -> None:
        """Add this rank's part of the gradient: of ``loss_sum`` over the ``valid_tokens`` of all ranks, scaled."""
        (loss_sum * (self._loss_scale / max(valid_tokens, 1))).backward()

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale
