"""What backward needs is computed again instead of being kept: memory is bought with time."""

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.catalogue.entry import Knob, Optimisation
from drivetrain.catalogue.larger_batch import (
    BATCH_LEAVES,
    LARGER_BATCH,
    batch_in_words,
    larger_batches,
    predict_larger_batch,
    why_no_larger_batch,
)
from drivetrain.catalogue.move import Move, Setting
from drivetrain.catalogue.time_models.repeating import REPEATED_FORWARD
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.config.layout import stage_plan
from drivetrain.config.stages import ZERO_BUBBLE
from drivetrain.errors import ConfigurationError
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "memory.recompute_granularity"
_MODULES = "memory.recompute_modules"
_LAYERS = "memory.recompute_num_layers"
_MOST_LAYERS = 1000
_SPAN = "drivetrain/recompute/"
"""Begins the name of the region in which a forward pass is repeated; what is repeated follows."""
_CHEAP = "core_attn,mlp_act,norm"
"""All that is repeated without a product with weights."""
_OF_OTHERS = ("recompute_method", "recompute_num_layers", "recompute_modules", "budget_bytes")


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.memory.recompute_granularity != "none" or _halves(config):
        return None
    if config.fusion.compile:
        return {_FIELD: "full"}
    return {_FIELD: "selective", _MODULES: _CHEAP}


def _off(config: RunConfig) -> Mapping[str, Any]:
    given = {f"memory.{name}": None for name in _OF_OTHERS if getattr(config.memory, name) is not None}
    return {_FIELD: "none", **given}


def _evidence(config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    found = {
        name.removeprefix(_SPAN): count.calls for name, count in seen.ranges.items() if name.startswith(_SPAN)
    }
    if found:
        repeated = ", ".join(f"{calls} x {name}" for name, calls in sorted(found.items()))
        return Evidence("shown", f"forward passes were repeated: {repeated}")
    if "drivetrain/forward" not in seen.ranges and "drivetrain/pipeline" not in seen.ranges:
        return Evidence("unknown", "no forward pass was recorded in the window")
    if config.memory.recompute_granularity == "budget":
        return Evidence("unknown", "nothing was repeated, which is right where everything fits the budget")
    return Evidence("absent", "forward passes were recorded, and none was repeated")


def _layers(config: RunConfig, _facts: LaunchFacts) -> Sequence[float]:
    try:
        most = max(stage_plan(config).layers_per_stage)
    except ConfigurationError:
        return ()  # A rule says what is wrong with the stages.
    return range(1, min(most, _MOST_LAYERS) + 1)


def _no_layers(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if config.memory.recompute_granularity == "full":
        return None
    return f"{_LAYERS} is of {_FIELD} = full, and it is {config.memory.recompute_granularity}"


_LEAVES = frozenset({_FIELD, *(f"memory.{name}" for name in _OF_OTHERS)})


def _halves(config: RunConfig) -> bool:
    """Whether the schedule goes through backward twice, and would repeat everything each time."""
    parallelism = config.parallelism
    return parallelism.pipeline_model_parallel_size > 1 and parallelism.pipeline_schedule in ZERO_BUBBLE


def _no_larger_batch(config: RunConfig, setting: Setting) -> str | None:
    granularity = config.memory.recompute_granularity
    if granularity in ("full", "budget"):
        return f"{_FIELD} = {granularity} already"
    if _halves(config):
        return "zero-bubble schedules recompute nothing"
    return why_no_larger_batch(config, setting)


def _proposes(config: RunConfig, setting: Setting) -> list[dict[str, Any]]:
    """As little recomputed as the limit lets: the run's own budget, which is the limit where it has none."""
    budget = {**_off(config), _FIELD: "budget"}
    return [{**budget, **sizes} for sizes in larger_batches(config, setting)]


def _describes(before: RunConfig, after: RunConfig) -> str | None:
    """Something else is recomputed, and the batch is another as a batch changes (either way round)."""
    policies = [_policy(config) for config in (before, after)]
    if policies[0] == policies[1]:
        return None
    batch = batch_in_words(before, after)
    return None if batch is None else f"recompute {policies[0]} to {policies[1]}, {batch}"


def _policy(config: RunConfig) -> str:
    memory = config.memory
    given = {name: getattr(memory, name) for name in _OF_OTHERS if getattr(memory, name) is not None}
    return " ".join([memory.recompute_granularity, *(f"{name}={value}" for name, value in given.items())])


RECOMPUTE_LARGER_BATCH = Move(
    name="recompute_larger_batch",
    summary="as little as a memory limit lets is recomputed, and what that frees is filled with a larger batch",
    numerics="statistical",
    treats=LARGER_BATCH.treats,
    leaves=BATCH_LEAVES | _LEAVES,
    refused=_no_larger_batch,
    proposes=_proposes,
    describes=_describes,
    predict=predict_larger_batch,
)

ENTRY = Optimisation(
    name="recompute",
    summary="backward computes layers, or parts of them, again instead of keeping what it needs of them",
    sources=(
        "Chen et al. 2016, arXiv:1604.06174",
        "Korthikanti et al. 2022, arXiv:2205.05198",
        "Megatron-LM, --recompute-granularity",
        "MaxText, remat policies",
    ),
    field=_FIELD,
    requested=lambda config: config.memory.recompute_granularity != "none",
    on=_on,
    off=_off,
    numerics="exact",
    # It costs time; what it gives is memory, for a larger batch say.
    treats=(),
    relieves=("activations",),
    knobs=(
        Knob(
            _LAYERS,
            1,
            _MOST_LAYERS,
            whole=True,
            values=_layers,
            refused=_no_layers,
            treats=("recompute",),
            moves_memory=True,
            absent=1,
        ),
    ),
    # A larger batch without recompute comes first, so that what that brings is not laid at recompute's door.
    moves=(LARGER_BATCH, RECOMPUTE_LARGER_BATCH),
    evidence=_evidence,
    time_model=REPEATED_FORWARD,
    evidence_rule=(
        "shown: regions of repeated forward passes in the window; absent: forward passes without any; unknown where a "
        "budget may have left nothing to repeat"
    ),
)
