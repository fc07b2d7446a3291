"""Over-fit one batch: the first question to ask of a model that does not learn.

A model that cannot bring the loss of a single batch near zero has a fault in the model, the loss, the
gradients or the update; one that can has its fault in the data, the schedule or the scale. The same batch
is really the same: it is fetched once, dropout is off, the learning rate constant after a short warm-up.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from drivetrain.config import RunConfig
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.devices import Device
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.optimizer import build_optimizer, clip_gradients, set_learning_rate, why_not_fused
from drivetrain.engine.parallel.gradient_sync import Held
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks
from drivetrain.engine.precision import LossScaler, compute_dtype, look_for_overflow, optimizer_state_dtype

__all__ = ["NEAR_ZERO", "OverfitResult", "overfit_batch"]

NEAR_ZERO = 0.05
"""Nats per token below which one batch counts as learned by heart."""
WARMUP_STEPS = 10


@dataclass(frozen=True)
class OverfitResult:
    """What became of the batch.

    Attributes:
        learned: the loss came below :data:`NEAR_ZERO`.
        first_loss, last_loss: nats per token at the first and last step.
        uniform_loss: ln(V), what a model that knows nothing pays.
        steps: optimizer steps taken.
        diagnosis: why it was not learned, with the evidence; empty if it was.
    """

    learned: bool
    first_loss: float
    last_loss: float
    uniform_loss: float
    steps: int
    diagnosis: str


def overfit_batch(
    config: RunConfig,
    corpus: Corpus,
    device: Device,
    *,
    max_steps: int,
    on_step: Callable[[int, float], None],
) -> OverfitResult:
    """Train on the run's first micro-batch until its loss is near zero, or ``max_steps`` are over."""
    decoder = Decoder(config.model, compute_dtype(config.precision)).to(device.torch_device)
    initialize(decoder, config.run.seed)
    decoder.eval()
    # No decay: it pulls against exactly what is asked for here.
    optimizer = build_optimizer(
        decoder,
        config.optimizer.model_copy(update={"weight_decay": 0.0}),
        fused=config.optimizer.fused and why_not_fused(device.type) is None,
        state_dtype=optimizer_state_dtype(config.precision),
    )
    with BatchLoader(config, corpus, "train", num_samples=config.training.global_batch_size) as loader:
        batch = next(loader).to(device.torch_device)
    scaler = LossScaler(config.precision) if decoder.compute_dtype == torch.float16 else None
    losses: list[float] = []
    norms: list[float] = []
    for step in range(1, max_steps + 1):
        set_learning_rate(optimizer, config.optimizer.lr * min(1.0, step / WARMUP_STEPS))
        if scaler is not None:
            decoder.head.gradient_scale = 2.0 ** math.floor(math.log2(scaler.scale / batch.token_ids.numel()))
        loss = decoder.loss_sum(batch) / max(batch.num_valid_tokens, 1)
        (loss if scaler is None else loss * scaler.scale).backward()
        if scaler is not None and _overflowed(decoder, loss.detach(), scaler):
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
            norms.append(math.nan)
            if scaler.failure is not None:
                break
            continue
        norm, _ = clip_gradients(decoder.parameters(), config.training.clip_grad)
        losses.append(float(loss.detach()))
        norms.append(float(norm))
        if not math.isfinite(losses[-1]) or losses[-1] < NEAR_ZERO:
            break
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        on_step(step, losses[-1])
    uniform = math.log(config.model.vocab_size)
    learned = losses[-1] < NEAR_ZERO
    return OverfitResult(
        learned=learned,
        first_loss=losses[0],
        last_loss=losses[-1],
        uniform_loss=uniform,
        steps=len(losses),
        diagnosis=""
        if learned
        else (scaler.failure if scaler is not None else None)
        or diagnose(losses, norms, uniform, config.optimizer.lr, batch.num_valid_tokens),
    )


def _overflowed(decoder: Decoder, loss: torch.Tensor, scaler: LossScaler) -> bool:
    """Take the loss scale out of the gradients; whether they overflowed."""
    gradients = {
        name: Held(parameter.grad, Placement(tuple(parameter.shape)))
        for name, parameter in decoder.named_parameters()
        if parameter.grad is not None
    }
    overflow = look_for_overflow(gradients, loss, scaler.scale, ProcessGroup(Ranks()))
    scaler.update(overflow=overflow.found, finite_loss=overflow.finite_loss)
    return overflow.found


def diagnose(
    losses: list[float], norms: list[float], uniform: float, learning_rate: float, valid_tokens: int
) -> str:
    """Why a batch was not learned, from its losses and gradient norms. The first that applies, data first."""
    if valid_tokens == 0:
        return "no token of the batch carries loss: look at the loss mask (data.eod_mask_loss) and the corpus"
    bad = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if bad is not None:
        if bad == 0:
            return "the very first loss is not finite: the initial weights or the forward pass are at fault"
        return (
            f"the loss was {losses[bad - 1]:.3f} and then not finite at step {bad + 1} (gradient norm before: "
            f"{norms[bad - 1]:.3g}): lower optimizer.lr from {learning_rate:g}, or compute in fp32"
        )
    if max(norms) == 0:
        return "every gradient is zero: the loss does not reach the parameters"
    if losses[0] > 1.5 * uniform:
        return (
            f"the first loss is {losses[0]:.2f}, far above ln(vocab_size) = {uniform:.2f}: model.init_method_std "
            "is too large, or labels and logits do not match"
        )
    fallen = losses[0] - losses[-1]
    if fallen < 0.05 * losses[0]:
        return (
            f"the loss hardly moved ({losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps, gradient norm "
            f"{norms[-1]:.3g}): raise optimizer.lr from {learning_rate:g}, or the update does not reach the weights"
        )
    half = len(losses) // 2
    late = losses[half] - losses[-1]
    if late > 0.02 * losses[half]:
        return (
            f"the loss still falls ({losses[half]:.3f} to {losses[-1]:.3f} in the last {len(losses) - half} steps): "
            "allow more steps, or raise optimizer.lr"
        )
    return (
        f"the loss came down from {losses[0]:.3f} and stays at {losses[-1]:.3f}: lower optimizer.lr from "
        f"{learning_rate:g} if it swings, or the same input occurs with different labels in this batch"
    )
