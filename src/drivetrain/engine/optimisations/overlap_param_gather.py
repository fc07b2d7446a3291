"""Updated parameters travel to the ranks that need them while the next forward pass begins."""

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    building.overlap_param_gather = True
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare)
