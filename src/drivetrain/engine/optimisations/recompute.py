"""Layers, or parts of them, are computed again in backward."""

from drivetrain.engine.memory.recompute import Plan, Recomputation
from drivetrain.engine.memory.recompute_choice import (
    layers_by_stage,
    plan_of_choices,
    plan_of_config,
    repeated_layers,
)
from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _plan(building: Building) -> Plan:
    if building.config.memory.recompute_granularity != "budget":
        return plan_of_config(building.config.memory)
    assert building.recomputed is not None, (
        "a budget is turned into choices before the ranks have their group"
    )
    return plan_of_choices(building.recomputed)


def _prepare(building: Building) -> Status:
    assert building.decoder is not None
    plan = _plan(building)
    Recomputation(building.decoder, plan, stops_early=building.computes_in_one_piece)
    # An operator's or a compiled graph's tensors are saved when it has computed, a plain product's before.
    before_product = (
        building.computes_in_one_piece
        and not building.decoder_is_compiled
        and not building.operators.serves("linear")
    )
    building.repeated = repeated_layers(
        plan,
        layers_by_stage(building.config),
        with_last_product=not before_product,
        hidden_dropout=building.config.model.hidden_dropout > 0,
    )
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare, stage="model")
