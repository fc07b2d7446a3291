"""The addition of the residual and the RMSNorm behind it in one pass over memory."""

from drivetrain.catalogue.operators import operator_entry
from drivetrain.config import LaunchFacts, RunConfig

__all__ = ["ENTRY"]


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    return None if config.model.normalization == "RMSNorm" else "the model has no RMSNorm"


ENTRY = operator_entry(
    "add_rms_norm",
    summary="the addition of the residual and the RMSNorm behind it in one pass over memory",
    sources=("Megatron-LM and Liger Kernel, fused residual and norm",),
    treats=("compute.norm", "compute.elementwise", "host.launch"),
    applies=_applies,
)
