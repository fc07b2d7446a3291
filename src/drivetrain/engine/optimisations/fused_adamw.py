"""The fused update of AdamW, where torch has a kernel of it for the device."""

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status
from drivetrain.engine.optimizer import why_not_fused

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    missing = why_not_fused(building.device.type)
    if missing is not None:
        return Status(active=False, reason=f"{missing}; its unfused update is used instead")
    building.fused_update = True
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare)
