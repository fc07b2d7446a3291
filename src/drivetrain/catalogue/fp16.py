"""Matrix products and activations in fp16 with a scaled loss; weights, gradients and optimizer state stay fp32."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.config.leaves import leaves
from drivetrain.config.precision_rules import given_scaling
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "precision.params_dtype"
_OTHERS = ("fp32", "tf32", "bf16", "fp64")


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    # bf16 has the same bytes and speed on what has both, and needs no loss scale: nothing to move to from there.
    return {_FIELD: "fp16"} if config.precision.params_dtype == "fp32" else None


def _off(config: RunConfig) -> Mapping[str, Any]:
    """With it goes what was asked of the loss scale, which nothing else has."""
    return {_FIELD: "fp32", **{path: leaves()[path].default for path in given_scaling(config)}}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    calls = {name: count.calls for name, count in seen.matmul_dtypes.items() if count.calls}
    known = sum(number for name, number in calls.items() if name != "unknown")
    if calls.get("fp16"):
        return Evidence(
            "shown", f"{calls['fp16']} of {known} matrix products of known dtype had fp16 operands"
        )
    if known:
        others = ", ".join(f"{calls[name]} in {name}" for name in _OTHERS if calls.get(name))
        return Evidence("absent", f"no matrix product had fp16 operands: {others or f'{known} in others'}")
    if "shapes" in seen.missing:
        return Evidence("unknown", "the trace has no operand types: record_shapes was off")
    return Evidence("unknown", "no matrix product of known dtype was recorded in the window")


ENTRY = Optimisation(
    name="fp16",
    summary="matrix products and activations in fp16 with a scaled loss, master weights and optimizer state in fp32",
    sources=(
        "Micikevicius et al. 2018, arXiv 1710.03740",
        "Megatron-LM, --fp16 and DynamicGradScaler",
        "SOURCES C12, E8",
    ),
    field=_FIELD,
    requested=lambda config: config.precision.params_dtype == "fp16",
    on=_on,
    off=_off,
    numerics="statistical",
    relieves=("activations", "temporaries"),
    treats=(
        "compute.matmul",
        "compute.attention",
        "compute.norm",
        "compute.activation",
        "compute.elementwise",
        "compute.loss",
    ),
    cures=("kernels.wrong_precision",),
    evidence=_evidence,
    conflicts=("bf16",),
    capability="fp16_native",
    evidence_rule=(
        "shown: matrix products with fp16 operands in the window; absent: products of known dtype, none of them "
        "in fp16. Steps that overflowed are in the run's events and in `optim/skipped_steps`"
    ),
)
