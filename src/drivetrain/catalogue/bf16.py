"""Matrix products and activations in bfloat16; weights, gradients and optimizer state stay fp32."""

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


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.precision.params_dtype == "bf16":
        return None
    # Coming from fp16, what was asked of its loss scale would be a broken rule.
    return {
        "precision.params_dtype": "bf16",
        **{path: leaves()[path].default for path in given_scaling(config)},
    }


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    return evidence_of_products("bf16", seen)


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
    time_model=SIXTEEN_BITS,
    capability="bf16_native",
    evidence_rule=(
        "shown: matrix products with bf16 operands in the window; absent: products of known dtype, none of them "
        "in bf16"
    ),
)
