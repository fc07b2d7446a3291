"""A larger batch as one change: the leaves that go with it, how it is told from other changes, what it may gain.

A batch of twice the size at the old learning rate and for as many steps is not the same training faster, it is another
training. So the number of steps, the learning rate and the held-out batches follow the global batch. A larger
micro-batch of the same global batch changes the order of sums, and what dropout draws.
"""

import math
from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.move import LearningRateRule, Move, Setting, StepEstimate
from drivetrain.config import (
    LaunchFacts,
    RunConfig,
    data_parallel_size,
    decay_tokens,
    num_microbatches,
    tokens_per_step,
)
from drivetrain.config.layout import model_ranks
from drivetrain.config.serialise import differing_leaves
from drivetrain.errors import ConfigurationError
from drivetrain.measure.account import Account
from drivetrain.measure.flops import model_flops
from drivetrain.measure.optimisation import NoPrediction, Prediction

__all__ = [
    "BATCH_LEAVES",
    "LARGER_BATCH",
    "batch_in_words",
    "batch_leaves",
    "larger_batches",
    "predict_larger_batch",
    "why_no_larger_batch",
]

_LIMIT = "memory.device_memory_limit_bytes"
_MICRO, _GLOBAL = "training.micro_batch_size", "training.global_batch_size"
BATCH_LEAVES = frozenset(
    {
        _MICRO,
        _GLOBAL,
        "training.train_iters",
        "training.eval_iters",
        "optimizer.lr",
        "lr_schedule.min_lr",
        "lr_schedule.lr_decay_tokens",
    }
)
"""All that a batch takes along."""
_SIZES = 8
"""That are proposed at most: each is tried without memory, which takes seconds."""
_GROWTH = (2, 3, 4, 6, 8, 12)
"""Times the global batch."""
_RELATIVE = 1e-6


def batch_leaves(config: RunConfig, factor: float, rule: LearningRateRule) -> dict[str, Any]:
    """A global batch of ``factor`` times the size, for as many tokens, at a learning rate by ``rule``.

    The number of steps is rounded up, so that no token fewer is seen; warm-up and decay are in tokens and stay. The
    end of the decay, where it follows from the length of the run, is pinned to the tokens it was. Held-out text is read
    in global batches: as many tokens of it, rounded up.

    Raises:
        ConfigurationError: the batch would not be a whole number of sequences; there is no such rule.
    """
    if rule not in _RULES:
        raise ConfigurationError(f"learning rate {rule!r}: no such rule; one of {', '.join(_RULES)}")
    if not 0 < factor < math.inf:
        raise ConfigurationError(f"a batch x {factor:g}: no positive number; x 2 is twice the batch")
    training = config.training
    batch = training.global_batch_size * factor
    if batch < 1 or abs(batch - round(batch)) > 1e-9:
        raise ConfigurationError(
            f"training.global_batch_size: {training.global_batch_size} x {factor:g} is {batch:g}, no whole number of "
            f"sequences; nearest: x {max(1, round(batch)) / training.global_batch_size:g}"
        )
    scale = _scale(rule, factor)
    size = round(batch)
    steps = -(-training.train_iters * training.global_batch_size // size)
    moved: dict[str, Any] = {_GLOBAL: size, "training.train_iters": steps}
    if training.eval_iters:
        moved["training.eval_iters"] = -(-training.eval_iters * training.global_batch_size // size)
    if scale != 1.0:
        moved["optimizer.lr"] = config.optimizer.lr * scale
        if config.lr_schedule.min_lr > 0:
            moved["lr_schedule.min_lr"] = config.lr_schedule.min_lr * scale
    if config.lr_schedule.lr_decay_style != "constant" and steps * size != (
        training.train_iters * training.global_batch_size
    ):
        moved["lr_schedule.lr_decay_tokens"] = decay_tokens(config)
    return moved


def _scale(rule: LearningRateRule, factor: float) -> float:
    return {"none": 1.0, "sqrt": math.sqrt(factor), "linear": factor}[rule]


def why_no_larger_batch(config: RunConfig, setting: Setting) -> str | None:
    """Why no larger batch is proposed; None where one is."""
    if config.memory.device_memory_limit_bytes is None:
        return f"{_LIMIT} is absent, so nothing says what a larger batch has to fit in"
    if setting.batch_rule is None and num_microbatches(config, setting.facts.world_size) == 1:
        return (
            f"{_GLOBAL} = {config.training.global_batch_size} is one micro-batch on each rank already, and the global "
            "batch may not grow (--grow-batch none, sqrt or linear lets it, with that rule for the learning rate)"
        )
    return None


def larger_batches(config: RunConfig, setting: Setting) -> list[dict[str, Any]]:
    """Leaves of each larger batch, the smallest first.

    The micro-batch grows within the global batch, to each size that divides it. Where a rule lets the global batch
    grow, it does so beyond that, and a step is one micro-batch on each rank.
    """
    micro = config.training.micro_batch_size
    passes = num_microbatches(config, setting.facts.world_size)
    within = [factor for factor in range(2, passes + 1) if passes % factor == 0]
    found: list[dict[str, Any]] = [{_MICRO: micro * factor} for factor in within]
    if setting.batch_rule is not None:
        found += [
            {_MICRO: micro * passes * factor, **batch_leaves(config, factor, setting.batch_rule)}
            for factor in _GROWTH
        ]
    return found[:_SIZES]


def batch_in_words(before: RunConfig, after: RunConfig) -> str | None:
    """The batch of ``after`` as a change of ``before``'s: sizes, and the rule of its learning rate.

    None where they differ in how many tokens the run or its evaluation sees, where the learning rate follows no rule
    (:data:`~drivetrain.catalogue.move.LearningRateRule`), or where the batch is the same.
    """
    first, second = before.training, after.training
    factor = second.global_batch_size / first.global_batch_size
    words = []
    if first.micro_batch_size != second.micro_batch_size:
        words.append(f"micro-batch {first.micro_batch_size} to {second.micro_batch_size}")
    if factor == 1:
        if not words or differing_leaves(before, after).keys() & (BATCH_LEAVES - {_MICRO}):
            return None
        return words[0]
    rule = _rule_between(before, after, factor)
    if rule is None or not _equal_tokens(before, after):
        return None
    words.append(f"global batch {first.global_batch_size} to {second.global_batch_size}")
    return f"{', '.join(words)} for as many tokens, learning rate {_RULES[rule]}"


_RULES: Mapping[LearningRateRule, str] = {
    "none": "unchanged",
    "sqrt": "by the square root of that",
    "linear": "in proportion",
}


def _rule_between(before: RunConfig, after: RunConfig, factor: float) -> LearningRateRule | None:
    for rule in _RULES:
        scale = _scale(rule, factor)
        pairs = (
            (before.optimizer.lr, after.optimizer.lr),
            (before.lr_schedule.min_lr, after.lr_schedule.min_lr),
        )
        if all(math.isclose(old * scale, new, rel_tol=_RELATIVE) for old, new in pairs):
            return rule
    return None


def _equal_tokens(before: RunConfig, after: RunConfig) -> bool:
    """Whether both see as much text, train and held-out, and decay alike. As many batches as one has text for, the last
    of them begun, is what the other may have: no less."""
    first, second = before.training, after.training
    sizes = first.global_batch_size, second.global_batch_size
    decays = before.lr_schedule.lr_decay_style != "constant"
    return (
        _same_text(sizes, (first.train_iters, second.train_iters))
        and _same_text(sizes, (first.eval_iters, second.eval_iters))
        and (not decays or decay_tokens(before) == decay_tokens(after))
    )


def _same_text(sizes: tuple[int, int], batches: tuple[int, int]) -> bool:
    """Whether either number of batches is what :func:`batch_leaves` makes of the other."""
    read = [size * number for size, number in zip(sizes, batches, strict=True)]
    return batches[1] == -(-read[0] // sizes[1]) or batches[0] == -(-read[1] // sizes[0])


def predict_larger_batch(
    account: Account,
    before: RunConfig,
    after: RunConfig,
    facts: LaunchFacts,
    needs: StepEstimate,
    needs_after: StepEstimate,
) -> Prediction | NoPrediction:
    """Tokens/s after over before, from what the steps of ``account`` pay once, once a micro-batch, and by the token.

    None where ranks share a model.
    """
    windows = [step.window for rank in account.ranks for step in rank.steady_steps]
    wall_ns = sum(window.window_ns for window in windows) / max(1, len(windows))
    if not wall_ns:
        return NoPrediction("the account has no steps")
    if model_ranks(before) > 1:
        return NoPrediction("ranks share a model: what they wait for each other depends on the schedule")

    def mean(*names: str) -> float:
        return sum(window.group_ns(name) for window in windows for name in names) / len(windows)

    reduced = mean("communication.dp")
    gathers = before.parallelism.zero_stage == 3
    update = mean("compute.optimizer")
    once = update + mean("host.sync") + (0.0 if gathers else reduced)
    by_pass = mean("host.launch", "host.python") + (reduced if gathers else 0.0)
    repeated = mean("recompute")
    by_token = wall_ns - once - by_pass - repeated
    products = mean("compute") - update
    if products <= 0:
        return NoPrediction("the profiled steps show no computation but the update")
    ranks = data_parallel_size(before, facts.world_size)
    tokens = tokens_per_step(before) // ranks
    flops = model_flops(
        before.model, tokens=tokens, sum_squared_lengths=tokens * before.model.seq_length
    ).total
    growth = tokens_per_step(after) / tokens_per_step(before)
    passes = num_microbatches(after, facts.world_size) / num_microbatches(before, facts.world_size)
    after_ns = (
        once + by_pass * passes + by_token * growth + needs_after.repeated_flops * products / max(1, flops)
    )
    return Prediction(
        wall_ns * growth / after_ns,
        "tokens/s: the update, synchronisation and data-parallel reductions (at zero_stage 3: gathers) are paid once a "
        "step (a micro-batch), launches once a micro-batch, as the account has them; all else grows with the tokens; "
        f"{needs_after.repeated_flops:.3g} repeated FLOPs a step at the speed of the step's own computation; kernels "
        "no faster and no slower with more rows",
        needs_after.peak_bytes - needs.peak_bytes,
    )


LARGER_BATCH = Move(
    name="larger_batch",
    summary="a larger micro-batch, and global batch with its learning rate where that may grow, in the memory there is",
    numerics="statistical",
    # What is paid once a micro-batch or once a step, and products of few rows.
    treats=("compute.matmul", "compute.optimizer", "communication", "host"),
    leaves=BATCH_LEAVES,
    refused=why_no_larger_batch,
    proposes=larger_batches,
    describes=batch_in_words,
    predict=predict_larger_batch,
)
