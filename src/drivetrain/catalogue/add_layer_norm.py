"""The addition of the residual and the LayerNorm behind it in one pass over memory."""

from drivetrain.catalogue.operators import operator_entry
from drivetrain.config import LaunchFacts, RunConfig

__all__ = ["ENTRY"]


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    return None if config.model.normalization == "LayerNorm" else "the model has no LayerNorm"


ENTRY = operator_entry(
    "add_layer_norm",
    summary="the addition of the residual and the LayerNorm behind it in one pass over memory",
    sources=("Megatron-LM, fused residual and norm",),
    treats=("compute.norm", "compute.elementwise", "host.launch"),
    applies=_applies,
)
