"""A thread that builds batches ahead; the thread itself belongs to the loader."""

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    building.prefetch_batches = building.config.data.prefetch_batches
    return Status(active=True)


def _at_start(building: Building) -> Status:
    loader = building.loader
    assert loader is not None
    if loader.num_steps == 0:
        return Status(active=False, reason="no step is left to train")
    if loader.prefetches:
        return Status(active=True)
    return Status(active=False, reason="worker processes build the batches")


IMPLEMENTATION = Implementation(_prepare, at_start=_at_start)
