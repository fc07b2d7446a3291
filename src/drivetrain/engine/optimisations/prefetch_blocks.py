"""Shards of the blocks that come next are gathered while a block computes."""

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    building.prefetch_blocks = building.config.overlap.prefetch_blocks
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare)
