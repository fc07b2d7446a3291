"""The dtype that the optimizer's moments have between updates."""

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status
from drivetrain.engine.precision import optimizer_state_dtype

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    building.state_dtype = optimizer_state_dtype(building.config.precision)
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare)
