"""Build a run without starting it: everything that does not need memory, data or time."""

from dataclasses import dataclass

import torch

from drivetrain.config import RunConfig
from drivetrain.config.derive import num_microbatches, tokens_per_step, total_tokens
from drivetrain.engine.dry_run_world import PlannedWorld
from drivetrain.engine.model.batch import whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.precision import compute_dtype
from drivetrain.engine.schedule import learning_rate
from drivetrain.measure.flops import model_flops
from drivetrain.measure.parameters import parameter_count

__all__ = ["DryRun", "ParameterShape", "dry_run"]


@dataclass(frozen=True)
class ParameterShape:
    """Name, shape and number of elements of one parameter."""

    name: str
    shape: tuple[int, ...]
    elements: int


@dataclass(frozen=True)
class DryRun:
    """What would be built and done.

    Attributes:
        parameters: total number of parameters, counted on the built model.
        state_bytes: bytes of weights, reduced gradients and AdamW's moments, all fp32, on the rank that holds most of
            them, by the formulas of ``docs/parallel.md``; activations and buckets come on top.
        logits_shape: (micro_batch_size, seq_length, vocab_size), from a forward pass without data.
        learning_rates: (step, rate) at the first, middle and last step.
    """

    parameters: int
    state_bytes: int
    num_microbatches: int
    tokens_per_step: int
    total_tokens: int
    model_flops_per_step: int
    logits_shape: tuple[int, ...]
    learning_rates: tuple[tuple[int, float], ...]
    shapes: tuple[ParameterShape, ...]


def dry_run(config: RunConfig, world_size: int) -> DryRun:
    """Build the model on the meta device, run forward and backward of one micro-batch, walk the schedule.

    Raises:
        DrivetrainError: what would have stopped the run.
    """
    model, training = config.model, config.training
    with torch.device("meta"):
        decoder = Decoder(model, compute_dtype(config.precision))
    shape = (training.micro_batch_size, model.seq_length)
    batch = whole_sequences(torch.empty(shape, dtype=torch.int64, device="meta"))
    logits = decoder(batch)
    decoder.loss_sum(batch).backward()
    shapes = tuple(
        ParameterShape(name, tuple(parameter.shape), parameter.numel())
        for name, parameter in decoder.named_parameters()
    )
    without_gradient = [name for name, parameter in decoder.named_parameters() if parameter.grad is None]
    assert not without_gradient, f"parameters that no gradient reaches: {without_gradient}"
    parameters = sum(shape.elements for shape in shapes)
    assert parameters == parameter_count(model).total, "the counted model and the built one differ"
    per_step = tokens_per_step(config)
    in_all = total_tokens(config)
    steps = sorted({0, training.train_iters // 2, training.train_iters - 1})
    return DryRun(
        parameters=parameters,
        state_bytes=PlannedWorld.of(config, world_size).largest_state_bytes,
        num_microbatches=num_microbatches(config, world_size),
        tokens_per_step=per_step,
        total_tokens=in_all,
        model_flops_per_step=model_flops(
            model,
            tokens=per_step,
            sum_squared_lengths=training.global_batch_size * model.seq_length**2,
        ).total,
        logits_shape=tuple(logits.shape),
        learning_rates=tuple(
            (
                step + 1,
                learning_rate(step * per_step + per_step // 2, config.optimizer, config.lr_schedule, in_all),
            )
            for step in steps
        ),
        shapes=shapes,
    )
