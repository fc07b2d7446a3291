"""bf16 as the dtype of matrix products and activations."""

from drivetrain.engine.capabilities import capability
from drivetrain.engine.optimisations.implementation import Building, Implementation, Status
from drivetrain.engine.precision import compute_dtype

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    building.compute_dtype = compute_dtype(building.config.precision)
    units = capability("bf16_native", building.device)
    if units.available:
        return Status(active=True)
    return Status(
        active=True,
        reason=f"{units.reason}; it is emulated, saves memory and may well be slower than params_dtype = fp32",
    )


IMPLEMENTATION = Implementation(_prepare)
