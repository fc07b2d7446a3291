"""Worker processes that build batches; the processes themselves belong to the loader."""

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    building.num_workers = building.config.data.num_workers
    return Status(active=True)


def _at_start(building: Building) -> Status:
    loader = building.loader
    assert loader is not None
    if loader.num_steps == 0:
        return Status(active=False, reason="no step is left to train")
    alive, asked = loader.workers_alive, building.num_workers
    if alive == asked:
        return Status(active=True)
    return Status(active=alive > 0, reason=f"{alive} of {asked} worker processes are alive")


IMPLEMENTATION = Implementation(_prepare, at_start=_at_start)
