"""Matrix products and activations in fp16 with a scaled loss; weights, gradients and optimizer state stay fp32."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.product_dtypes import evidence_of_products
from drivetrain.catalogue.time_models.products import SIXTEEN_BITS
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.config.leaves import leaves
from drivetrain.config.precision_rules import given_scaling
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "precision.params_dtype"


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    # bf16 has the same bytes and speed on what has both, and needs no loss scale: nothing to move to from there.
    return {_FIELD: "fp16"} if config.precision.params_dtype == "fp32" else None


def _off(config: RunConfig) -> Mapping[str, Any]:
    """With it goes what was asked of the loss scale, which nothing else has."""
    return {_FIELD: "fp32", **{path: leaves()[path].default for path in given_scaling(config)}}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    return evidence_of_products("fp16", seen)


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
    time_model=SIXTEEN_BITS,
    conflicts=("bf16",),
    capability="fp16_native",
    evidence_rule=(
        "shown: matrix products with fp16 operands in the window; absent: products of known dtype, none of them "
        "in fp16. Steps that overflowed are in the run's events and in `optim/skipped_steps`"
    ),
)
