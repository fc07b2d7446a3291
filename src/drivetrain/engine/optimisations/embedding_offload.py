"""The input embedding lives in host memory, and the rows that are used visit the device."""

from drivetrain.config import layout_of
from drivetrain.engine.memory.offload_copies import nothing_is_saved
from drivetrain.engine.memory.offload_embedding import EmbeddingOffload
from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    device = building.device.torch_device
    if device.type != "cpu" and layout_of(building.config, building.num_ranks).dp > 1:
        # A bucket is one tensor on one device.
        return Status(
            active=False,
            reason="data-parallel ranks sum gradients on the device, and the embedding's is on the host",
        )
    building.embedding_offload = EmbeddingOffload(building.copies())
    return Status(active=True, reason=nothing_is_saved(device))


def _look(building: Building) -> Status:
    """Steps were trained."""
    offload = building.embedding_offload
    assert offload is not None, "it was prepared"
    if offload.rows_moved == 0:
        return Status(active=False, reason="rank 0 holds no embedding")
    return Status(active=True, reason=nothing_is_saved(building.device.torch_device))


IMPLEMENTATION = Implementation(_prepare, at_end=_look)
