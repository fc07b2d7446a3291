"""What a step of a configuration needs: its peak, and what backward computes again; nothing is run for it."""

from collections import Counter
from collections.abc import Mapping

from drivetrain.catalogue import StepEstimate
from drivetrain.config import RunConfig, layout_of
from drivetrain.config.derive import microbatches_per_rank
from drivetrain.engine.memory.recompute_budget import budget_of, name_of, plan_of_run
from drivetrain.engine.memory.recompute_choice import Choice, layers_of_rank, plan_of_choices, plan_of_config
from drivetrain.engine.memory.recompute_measure import cost_of_choices, peak_of_step

__all__ = ["estimate_step"]


def estimate_step(config: RunConfig, world_size: int) -> StepEstimate:
    """Of the rank that holds most; not while a process group is there.

    Live bytes are counted as ``memory.device_memory_limit_bytes`` counts them. Repeated FLOPs are those of the layers'
    choices (:func:`~drivetrain.engine.memory.recompute_measure.cost_of_choices`) over all micro-batches of a step.

    Args:
        config: the rules must hold.

    Raises:
        ConfigurationError: its memory budget is too small for anything.
    """
    layout = layout_of(config, world_size)
    found = []
    for pp in range(layout.pp):
        rank = layout.rank_of({"tp": 0, "cp": 0, "pp": pp, "dp": 0})
        if config.memory.recompute_granularity == "budget":
            plan = plan_of_run(config, world_size, rank, budget_of(config))
            choices, peak_bytes = dict(plan.choices), plan.peak_bytes
        else:
            choices = _choices(config, layers_of_rank(config, world_size, rank))
            none = config.memory.recompute_granularity == "none"
            shares = plan_of_choices(choices) if none else plan_of_config(config.memory)
            peak_bytes = peak_of_step(config, world_size, rank, shares)
        passes = microbatches_per_rank(config, layout.dp)
        repeated = _repeated_flops(config, choices) * passes // layout.tp
        found.append(StepEstimate(peak_bytes, repeated, _in_words(choices)))
    return max(found, key=lambda one: one.peak_bytes)


def _choices(config: RunConfig, layers: tuple[str, ...]) -> dict[str, Choice]:
    """What a granularity other than a budget has each layer of a rank compute again."""
    memory = config.memory
    if memory.recompute_granularity == "none":
        return dict.fromkeys(layers, frozenset())
    if memory.recompute_granularity == "selective":
        return {
            layer: frozenset(part for share in plan_of_config(memory)([layer]) for part in share.parts)
            for layer in layers
        }
    whole = len(layers)
    if memory.recompute_method == "block":
        whole = memory.recompute_num_layers or 1
    return {layer: None if place < whole else frozenset() for place, layer in enumerate(layers)}


def _repeated_flops(config: RunConfig, choices: Mapping[str, Choice]) -> int:
    """Of one micro-batch."""
    kinds = [frozenset(), *dict.fromkeys(choices.values())]
    if len(set(kinds)) == 1:
        return 0
    costs = {one.choice: one.repeated_flops for one in cost_of_choices(config, list(dict.fromkeys(kinds)))}
    return sum(costs[choice] for choice in choices.values())


def _in_words(choices: Mapping[str, Choice]) -> str:
    """``4 x norm; 2 x all``; empty where nothing is computed again."""
    counted = Counter(choices.values())
    return "; ".join(
        f"{layers} x {name_of(choice)}" for choice, layers in counted.items() if choice != frozenset()
    )
