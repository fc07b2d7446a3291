"""Finished sequences on disk; the files belong to the samples (``engine/data/sample_cache.py``)."""

from pathlib import Path

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status
from drivetrain.measure.machine import cache_folder

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    data = building.config.data
    folder = cache_folder() / "samples" if data.sample_cache_path is None else Path(data.sample_cache_path)
    building.sample_cache = (folder, data.sample_cache_bytes)
    return Status(active=True)


def _look(building: Building) -> Status:
    loader = building.loader
    assert loader is not None
    if loader.cache_fault is not None:
        return Status(active=False, reason=loader.cache_fault)
    slots = sum(cache.num_slots for cache in loader.samples.caches)
    if slots == 0:
        return Status(active=False, reason="data.sample_cache_bytes holds not one sequence")
    if slots < loader.samples_per_epoch:
        return Status(active=True, reason=f"it holds {slots:,} of {loader.samples_per_epoch:,} sequences")
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare, at_start=_look, at_end=_look)
