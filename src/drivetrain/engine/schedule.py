"""The learning rate as a pure function of tokens seen."""

import math

from drivetrain.config.training import LearningRateScheduleConfig, OptimizerConfig

__all__ = ["learning_rate"]


def learning_rate(
    tokens_seen: int,
    optimizer: OptimizerConfig,
    lr_schedule: LearningRateScheduleConfig,
    total_tokens: int,
) -> float:
    """Learning rate of a step before which ``tokens_seen`` tokens were trained on.

    Being a function of tokens alone, it does not change when the same tokens are cut into other batches.
    Shapes are Megatron's (``OptimizerParamScheduler``): linear warm-up from 0 over ``lr_warmup_tokens``, then

    - ``cosine``: half a cosine from ``optimizer.lr`` to ``min_lr``, ending at ``lr_decay_tokens``;
    - ``WSD``: ``optimizer.lr`` until ``lr_wsd_decay_tokens`` before ``lr_decay_tokens``, then down to
      ``min_lr`` linearly, along half a cosine, or as ``1 - sqrt(x)``;
    - ``constant``: ``optimizer.lr`` for ever.

    From ``lr_decay_tokens`` on the rate stays at ``min_lr``.

    Args:
        tokens_seen: at least 0; may exceed ``total_tokens``.
        total_tokens: tokens of the whole run, at which the decay ends when ``lr_decay_tokens`` is absent.
    """
    assert tokens_seen >= 0, tokens_seen
    warmup = lr_schedule.lr_warmup_tokens
    if tokens_seen < warmup:
        return optimizer.lr * tokens_seen / warmup
    if lr_schedule.lr_decay_style == "constant":
        return optimizer.lr
    end = lr_schedule.decay_end(total_tokens)
    start, shape = warmup, "cosine"
    if lr_schedule.lr_decay_style == "WSD":
        start = max(warmup, end - lr_schedule.wsd_decay_length(total_tokens))
        shape = lr_schedule.lr_wsd_decay_style
    if tokens_seen >= end:
        return lr_schedule.min_lr
    if tokens_seen <= start:
        return optimizer.lr
    remaining = _remaining(shape, (tokens_seen - start) / (end - start))
    return lr_schedule.min_lr + (optimizer.lr - lr_schedule.min_lr) * remaining


def _remaining(shape: str, progress: float) -> float:
    """How much of the way from ``min_lr`` to ``lr`` is left, 1 to 0, at ``progress`` 0 to 1 of the decay."""
    if shape == "linear":
        return 1.0 - progress
    if shape == "minus_sqrt":
        return 1.0 - math.sqrt(progress)
    assert shape == "cosine", shape
    return 0.5 * (1.0 + math.cos(math.pi * progress))
