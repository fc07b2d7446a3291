"""One kernel for LayerNorm, forward and backward."""

from drivetrain.catalogue.operators import operator_entry
from drivetrain.config import LaunchFacts, RunConfig

__all__ = ["ENTRY"]


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    return None if config.model.normalization == "LayerNorm" else "the model has no LayerNorm"


ENTRY = operator_entry(
    "layer_norm",
    summary="one kernel for LayerNorm, forward and backward",
    sources=("Ba et al., arXiv:1607.06450",),
    treats=("compute.norm", "host.launch"),
    applies=_applies,
)
