"""Collectives of data parallelism in levels: inside a machine, between machines, inside again."""

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    sizes = building.local_world_sizes
    if len(sizes) > 1:
        return Status(
            active=False,
            reason=f"machines have different numbers of processes: {', '.join(map(str, sorted(sizes)))}",
        )
    (building.ranks_per_host,) = sizes
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare)
