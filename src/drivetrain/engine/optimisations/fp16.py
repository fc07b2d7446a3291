"""fp16 as the dtype of matrix products and activations. The loss scale that it needs is the stepper's."""

from drivetrain.engine.capabilities import capability
from drivetrain.engine.optimisations.implementation import Building, Implementation, Status
from drivetrain.engine.precision import compute_dtype

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    building.compute_dtype = compute_dtype(building.config.precision)
    units = capability("fp16_native", building.device)
    if units.available:
        return Status(active=True)
    return Status(
        active=True,
        reason=f"{units.reason}; what it saves is memory",
    )


IMPLEMENTATION = Implementation(_prepare)
