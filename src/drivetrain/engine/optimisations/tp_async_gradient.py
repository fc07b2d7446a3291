"""Gradients of what enters tensor-parallel matrices travel while those of the weights are computed."""

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    building.tp_async_input_gradient = True
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare)
