"""How many chunks the collectives of tensor-parallel layers are cut into: as asked for, or as tuned of each product."""

from drivetrain.catalogue.tp_chunks import rows_of_rank
from drivetrain.engine.optimisations.implementation import Building, Implementation, Status
from drivetrain.engine.parallel.tensor_parallel_overlap import WHOLE, Chunks

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    config = building.config
    wanted = config.overlap.wanted_tp_chunks
    if wanted is None:
        tuned = building.tuned_chunks
        if tuned is None:
            return Status(active=False, reason="no tuned file was read; the plain way is taken")
        building.tp_chunks = tuned.chunks
        return Status(active=tuned.chunks != WHOLE, reason=tuned.reason)
    rows = rows_of_rank(config)
    asked = Chunks.of_all(wanted)
    building.tp_chunks = asked.of_rows(rows)
    if building.tp_chunks == asked:
        return Status(active=True)
    return Status(
        active=True,
        reason=f"a micro-batch has {rows} rows on each rank: there are {rows} chunks, not {wanted}",
    )


IMPLEMENTATION = Implementation(_prepare)
