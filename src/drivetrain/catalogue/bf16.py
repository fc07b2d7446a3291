"""Matrix products and activations in bfloat16; weights, gradients and optimizer state stay fp32."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.config.leaves import leaves
from drivetrain.config.precision_rules import given_scaling
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_OTHERS = ("fp32", "tf32", "fp16", "fp64")


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.precision.params_dtype == "bf16":
        return None
    # Coming from fp16, what was asked of its loss scale would be a broken rule.
    return {
        "precision.params_dtype": "bf16",
        **{path: leaves()[path].default for path in given_scaling(config)},
    }


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    calls = {name: count.calls for name, count in seen.matmul_dtypes.items() if count.calls}
    known = sum(number for name, number in calls.items() if name != "unknown")
    if calls.get("bf16"):
        return Evidence(
            "shown", f"{calls['bf16']} of {known} matrix products of known dtype had bf16 operands"
        )
    if known:
        others = ", ".join(f"{calls[name]} in {name}" for name in _OTHERS if calls.get(name))
        return Evidence("absent", f"no matrix product had bf16 operands: {others or f'{known} in others'}")
    if "shapes" in seen.missing:
        return Evidence("unknown", "the trace has no operand types: record_shapes was off")
    return Evidence("unknown", "no matrix product of known dtype was recorded in the window")


ENTRY = Optimisation(
    name="bf16",
    summary="matrix products and activations in bf16, master weights and optimizer state in fp32",
    sources=("Kalamkar et al. 2019, arXiv 1905.12322", "Micikevicius et al. 2018, arXiv 1710.03740"),
    field="precision.params_dtype",
    requested=lambda config: config.precision.params_dtype == "bf16",
    on=_on,
    off=lambda _config: {"precision.params_dtype": "fp32"},
    numerics="statistical",
    relieves=("activations", "temporaries"),
    # Half the bytes as well as faster products; casts of the weights come on top, so copy_cast is not treated.
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
    capability="bf16_native",
    evidence_rule=(
        "shown: matrix products with bf16 operands in the window; absent: products of known dtype, none of them "
        "in bf16"
    ),
)
