"""One product for gate and up."""

from drivetrain.catalogue.operators import operator_entry
from drivetrain.config import LaunchFacts, RunConfig

__all__ = ["ENTRY"]


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if config.model.activation_func != "swiglu":
        return "the model's MLP has no gate"
    if config.model.add_bias_linear:
        return "products with a bias (model.add_bias_linear) stay products of their own"
    return None


ENTRY = operator_entry(
    "gate_up_product",
    summary="one product for gate and up",
    sources=("Megatron-LM, arXiv:1909.08053",),
    treats=("compute.matmul", "host.launch"),
    applies=_applies,
)
