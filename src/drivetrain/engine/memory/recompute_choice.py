"""What a configuration asks to be recomputed, as a plan of layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from drivetrain.config import MemoryConfig, RunConfig, layout_of
from drivetrain.config.layout import stage_plan
from drivetrain.engine.memory.recompute import Plan, Share, drop_segments
from drivetrain.engine.model.parts import PARTS, Part
from drivetrain.measure.flops import RepeatedLayers

__all__ = [
    "Choice",
    "ChoiceCost",
    "choices_for",
    "layers_by_stage",
    "layers_of_rank",
    "plan_of_choices",
    "plan_of_config",
    "repeated_layers",
]


Choice = frozenset[Part] | None
"""Parts of a layer that are recomputed; None: all of it."""


@dataclass(frozen=True)
class ChoiceCost:
    """What a choice means for one layer and one micro-batch.

    Attributes:
        held_bytes: alive behind its forward pass for its backward pass, its input included.
        repeated_flops: products that are computed again, and one for each element that any other operator writes again.
    """

    choice: Choice
    held_bytes: int
    repeated_flops: int


def choices_for(*, compiled: bool) -> list[Choice]:
    """All that can be chosen for a layer, nothing first."""
    if compiled:
        return [frozenset(), frozenset({"core_attn"}), None]
    mlp: list[frozenset[Part]] = [frozenset(), frozenset({"mlp_act"}), frozenset({"mlp"})]
    norm: list[frozenset[Part]] = [frozenset(), frozenset({"norm"})]
    attention: list[frozenset[Part]] = [frozenset(), frozenset({"core_attn"})]
    return [*(frozenset().union(*parts) for parts in product(norm, attention, mlp)), None]


def layers_by_stage(config: RunConfig) -> list[tuple[str, ...]]:
    """Names of the layers that run one after the other, for each stage of the whole model."""
    if config.parallelism.pipeline_model_parallel_size == 1:
        return [tuple(str(layer) for layer in range(config.model.num_layers))]
    stages = stage_plan(config)
    return [stages.layers(stage) for stage in range(stages.num_stages)]


def layers_of_rank(config: RunConfig, world_size: int, rank: int) -> tuple[str, ...]:
    """Names of all layers that ``rank`` holds, in model order."""
    if config.parallelism.pipeline_model_parallel_size == 1:
        return layers_by_stage(config)[0]
    return stage_plan(config).layers_on(layout_of(config, world_size).coordinates(rank)["pp"])


def plan_of_config(memory: MemoryConfig) -> Plan:
    """The plan of the granularities ``full`` and ``selective``.

    ``uniform``: as many neighbours as recompute_num_layers are one segment, the last ones of a stage maybe fewer.
    ``block``: that many layers at the beginning of a stage are segments of their own, those behind them are kept.
    """
    assert memory.recompute_granularity in ("full", "selective")
    if memory.recompute_granularity == "selective":
        parts = frozenset(part for part in PARTS if part in memory.recomputed_parts)
        return lambda names: [Share(tuple(names), parts=parts, policy=drop_segments)]
    count = memory.recompute_num_layers or 1
    if memory.recompute_method == "block":
        return lambda names: [
            *(Share((name,), whole=True, policy=drop_segments) for name in names[:count]),
            Share(tuple(names[count:])),
        ]
    return lambda names: [
        Share(tuple(names[first : first + count]), whole=True, policy=drop_segments)
        for first in range(0, len(names), count)
    ]


def plan_of_choices(choices: Mapping[str, Choice]) -> Plan:
    """One choice for each layer, by name: the parts that are recomputed, or None: all of it. Layers that are not named
    recompute nothing."""

    def plan(names: Sequence[str]) -> list[Share]:
        shares = []
        for name in names:
            parts = choices.get(name, frozenset())
            if parts is None:
                shares.append(Share((name,), whole=True, policy=drop_segments))
            else:
                shares.append(Share((name,), parts=parts, policy=drop_segments if parts else None))
        return shares

    return plan


def repeated_layers(
    plan: Plan, stages: Iterable[Sequence[str]], *, with_last_product: bool, hidden_dropout: bool = False
) -> RepeatedLayers:
    """What ``plan`` computes again in those stages.

    Args:
        with_last_product: a repeated pass is not left before the last product of its segment.
        hidden_dropout: a layer ends in dropout, whose mask is saved behind that product.
    """
    found = RepeatedLayers()
    for share in (share for names in stages for share in plan(names)):
        layers = len(share.layers)
        ending = 0
        if share.whole:
            # Inside a segment of several layers what leaves one enters the next.
            ending = layers if with_last_product or hidden_dropout else layers - 1
        elif "mlp" in share.parts:
            ending = layers if with_last_product else 0
        found = found.plus(
            RepeatedLayers(
                whole=layers if share.whole else 0,
                attention=layers if "core_attn" in share.parts else 0,
                mlp=layers if "mlp" in share.parts else 0,
                last_products=ending,
            )
        )
    return found
