"""One kernel turns queries or keys by their positions."""

from drivetrain.catalogue.operators import operator_entry
from drivetrain.config import LaunchFacts, RunConfig

__all__ = ["ENTRY"]


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    return None if config.model.position_embedding_type == "rope" else "the model has no rotary embedding"


ENTRY = operator_entry(
    "rotary",
    summary="one kernel turns queries or keys by their positions",
    sources=("Su et al., arXiv:2104.09864", "Liger Kernel, arXiv:2410.10989"),
    treats=("compute.elementwise", "compute.copy_cast", "host.launch"),
    applies=_applies,
)
