"""One kernel for RMSNorm, forward and backward."""

from drivetrain.catalogue.operators import operator_entry
from drivetrain.config import LaunchFacts, RunConfig

__all__ = ["ENTRY"]


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    return None if config.model.normalization == "RMSNorm" else "the model has no RMSNorm"


ENTRY = operator_entry(
    "rms_norm",
    summary="one kernel for RMSNorm, forward and backward",
    sources=("Zhang and Sennrich, arXiv:1910.07467", "Liger Kernel, arXiv:2410.10989"),
    treats=("compute.norm", "host.launch"),
    applies=_applies,
)
