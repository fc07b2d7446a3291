"""The size of the buckets in which gradients are reduced over data-parallel ranks."""

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    building.bucket_size_mb = building.config.overlap.bucket_size_mb
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare)
