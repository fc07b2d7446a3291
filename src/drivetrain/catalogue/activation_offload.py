"""Activations of the first layers wait for their backward pass in host memory."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.offload_evidence import evidence_of_copies
from drivetrain.config import LaunchFacts, Rule, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "memory.cpu_offloading_num_layers"
_RECOMPUTE = "memory.recompute_granularity"


def _layers_exist(config: RunConfig, _facts: LaunchFacts) -> str | None:
    asked, layers = config.memory.cpu_offloading_num_layers, config.model.num_layers
    if asked <= layers:
        return None
    return f"{asked} is more than model.num_layers = {layers}; the nearest legal value is {layers}"


def _nothing_is_recomputed(config: RunConfig, _facts: LaunchFacts) -> str | None:
    granularity = config.memory.recompute_granularity
    if not config.memory.cpu_offloading_num_layers or granularity == "none":
        return None
    return (
        f"{config.memory.cpu_offloading_num_layers} layers with {_RECOMPUTE} = {granularity}: what is computed again "
        f'is not saved, and so not moved; nearest legal values: {_FIELD} = 0; {_RECOMPUTE} = "none"'
    )


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    memory = config.memory
    if memory.cpu_offloading_num_layers or memory.recompute_granularity != "none":
        return None
    # The last layer is used as soon as it has left.
    return {_FIELD: max(1, config.model.num_layers - 1)}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    return evidence_of_copies(
        seen, "drivetrain/offload/activations", "activations of a layer left for the host"
    )


ENTRY = Optimisation(
    name="activation_offload",
    summary="activations of the first layers wait for backward in host memory, fetched one layer ahead",
    sources=(
        "Rhu et al. 2016 (vDNN), arXiv 1602.08124",
        "Megatron-LM, --cpu-offloading-num-layers",
        "SOURCES A11, D4",
    ),
    field=_FIELD,
    requested=lambda config: config.memory.cpu_offloading_num_layers > 0,
    on=_on,
    off=lambda _config: {_FIELD: 0},
    numerics="exact",
    treats=(),
    relieves=("activations",),
    evidence=_evidence,
    no_prediction=("at what rate device and host memory exchange data is not among the measured ceilings"),
    requires=(
        Rule(
            "offloaded-layers-exist",
            (_FIELD, "model.num_layers"),
            _layers_exist,
            "cpu_offloading_num_layers is at most model.num_layers.",
        ),
        Rule(
            "offload-without-recompute",
            (_FIELD, _RECOMPUTE),
            _nothing_is_recomputed,
            "cpu_offloading_num_layers above 0 needs recompute_granularity = none.",
        ),
    ),
    evidence_rule=(
        "shown: activations that left for the host were recorded in the window; absent: steps without any. What "
        "travels, and how long it was waited for, are the metrics `offload/moved_bytes` and `offload/exposed_s`"
    ),
)
