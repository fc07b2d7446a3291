"""What a rank holds of a run's model: its part of the layers, and how its gradients meet those of the other ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from drivetrain.config import RunConfig
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.gradient_sync import GradientSync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.traffic import Traffic

__all__ = ["LocalModel", "build_local_model"]


@dataclass(frozen=True)
class LocalModel:
    """This rank's part of the model.

    Attributes:
        decoder: its parameters have the names of the whole model's.
        sync: sums gradients over data-parallel ranks; knows what is held where.
        traffic: what this rank has handed to collectives, of every kind of parallelism.
    """

    decoder: Decoder
    sync: GradientSync
    traffic: Traffic


def build_local_model(config: RunConfig, mesh: Mesh, device: torch.device, building: Building) -> LocalModel:
    """Build it, uninitialised. Collective over all ranks.

    Args:
        building: the choices of the optimisations: compute dtype and bucket size.
    """
    traffic = Traffic()
    placements: Mapping[str, Placement] = {}
    decoder = Decoder(config.model, building.compute_dtype).to(device)
    sync = gradient_sync(
        decoder,
        mesh,
        traffic,
        zero_stage=0,
        placements=placements,
        bucket_size_mb=building.bucket_size_mb or 0.0,
    )
    return LocalModel(decoder, sync, traffic)
