"""One kernel for the activated gate times up, and one for both gradients."""

from drivetrain.catalogue.operators import operator_entry
from drivetrain.config import LaunchFacts, RunConfig

__all__ = ["ENTRY"]


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    return None if config.model.activation_func == "swiglu" else "the model's MLP has no gate"


ENTRY = operator_entry(
    "glu",
    summary="one kernel for the activated gate times up, and one for both gradients",
    sources=("Shazeer, arXiv:2002.05202", "Liger Kernel, arXiv:2410.10989"),
    treats=("compute.activation", "compute.elementwise", "host.launch"),
    applies=_applies,
)
