"""One product for queries, keys and values."""

from drivetrain.catalogue.operators import operator_entry
from drivetrain.config import LaunchFacts, RunConfig

__all__ = ["ENTRY"]


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if config.model.add_bias_linear:
        return "products with a bias (model.add_bias_linear) stay products of their own"
    return None


ENTRY = operator_entry(
    "qkv_product",
    summary="one product for queries, keys and values",
    sources=("Megatron-LM, arXiv:1909.08053",),
    treats=("compute.matmul", "host.launch"),
    applies=_applies,
)
