"""A share of the optimizer's state lives in host memory."""

from drivetrain.engine.memory.offload_copies import nothing_is_saved
from drivetrain.engine.memory.offload_optimizer import StateOffload
from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    fraction = building.config.memory.optimizer_offload_fraction
    building.state_offload = StateOffload(fraction, building.copies())
    return Status(active=True, reason=nothing_is_saved(building.device.torch_device))


def _look(building: Building) -> Status:
    """The optimizer is there."""
    offload = building.state_offload
    assert offload is not None, "it was prepared"
    if offload.host_bytes == 0:
        return Status(
            active=False,
            reason="states are moved by whole parameters, and the smallest is more than this share of rank 0's",
        )
    return Status(active=True, reason=nothing_is_saved(building.device.torch_device))


IMPLEMENTATION = Implementation(_prepare, at_start=_look)
