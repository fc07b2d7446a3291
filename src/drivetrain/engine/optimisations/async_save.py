"""Checkpoints that a thread writes; the thread belongs to the run's saver."""

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    building.async_save = True
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare)
