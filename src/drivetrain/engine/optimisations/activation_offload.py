"""Activations of the first layers wait for their backward pass in host memory."""

from drivetrain.engine.memory.offload_activations import ActivationOffload
from drivetrain.engine.memory.offload_copies import nothing_is_saved
from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    decoder = building.decoder
    assert decoder is not None, "stage model"
    assert decoder.run_layers is None, "rule offload-without-recompute was not checked"
    offload = ActivationOffload(
        building.copies(), decoder.blocks, building.config.memory.cpu_offloading_num_layers
    )
    building.activation_offload = offload
    decoder.run_layers = offload.run_layers
    return Status(active=True, reason=nothing_is_saved(building.device.torch_device))


def _look(building: Building) -> Status:
    """Steps were trained."""
    offload = building.activation_offload
    assert offload is not None, "it was prepared"
    if offload.layers_moved == 0:
        return Status(active=False, reason="rank 0 holds none of these layers, or they saved nothing to move")
    return Status(active=True, reason=nothing_is_saved(building.device.torch_device))


IMPLEMENTATION = Implementation(_prepare, stage="model", at_end=_look)
