"""Operators of the registry do what the model's own code would, as many as the level says."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.operators import calls_by_backend, evidence_of_regions
from drivetrain.catalogue.time_models.activations import FUSED_OPERATORS
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.config.fusion import LEVELS, OFF
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "fusion.level"


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    return None if config.fusion.level != OFF else {_FIELD: "all"}


def _evidence(config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    shown = [name for name in sorted(LEVELS[config.fusion.level]) if calls_by_backend(seen, name)]
    if shown:
        return Evidence("shown", f"calls of {', '.join(shown)}")
    return evidence_of_regions(config, seen)


ENTRY = Optimisation(
    name="fusion_level",
    summary="fused operators instead of the model's own code, each as tuned or as it prefers",
    sources=("Liger Kernel, arXiv:2410.10989", "Megatron-LM, arXiv:1909.08053"),
    field=_FIELD,
    requested=lambda config: config.fusion.level != OFF,
    on=_on,
    off=lambda _config: {_FIELD: OFF},
    # bias_dropout_add, which draws another dropout mask, is in no level.
    numerics="round-off",
    treats=(
        "compute.norm",
        "compute.activation",
        "compute.elementwise",
        "compute.copy_cast",
        "compute.attention",
        "compute.loss",
        "host.launch",
    ),
    cures=("host.launch_bound", "kernels.unfused_operators", "host.launch", "kernels.memory_bound_operators"),
    evidence=_evidence,
    time_model=FUSED_OPERATORS,
    evidence_rule=(
        "shown: regions of at least one of the level's operators in the window; absent: forward passes without any; "
        "unknown inside code of torch.compile, which opens none, and in a pipeline, where another stage may have them"
    ),
)
