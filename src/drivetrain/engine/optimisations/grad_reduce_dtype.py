"""The dtype that gradients have while they travel between data-parallel ranks."""

import torch

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    building.wire_dtype = torch.bfloat16
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare)
