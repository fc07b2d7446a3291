"""What a rank holds of a run's model: its part of the layers, and how its gradients meet those of the other ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from drivetrain.config import RunConfig
from drivetrain.config.layout import stage_plan
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.gradient_sync import GradientSync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline import Pipeline, decoder_of_rank
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.symmetric_memory import meet
from drivetrain.engine.parallel.tensor_parallel import tensor_parallel
from drivetrain.engine.parallel.traffic import Traffic

__all__ = ["LocalModel", "build_local_model"]


@dataclass(frozen=True)
class LocalModel:
    """This rank's part of the model.

    Attributes:
        decoder: its parameters have the names of the whole model's.
        pipeline: runs the passes of a step where the layers are spread over ranks; None: the decoder does.
        sync: sums gradients over data-parallel ranks; knows what is held where.
    """

    decoder: Decoder
    pipeline: Pipeline | None
    sync: GradientSync


def build_local_model(
    config: RunConfig,
    mesh: Mesh,
    device: torch.device,
    building: Building,
    pipeline_type: type[Pipeline] = Pipeline,
) -> LocalModel:
    """Build it, uninitialised. Collective over all ranks; no rank allocates more than its part.

    Layers are dealt out first, then matrices are cut, and what is left is shared over data-parallel ranks.

    Args:
        building: the choices of the optimisations: compute dtype, and how gradients and parameters travel.
        pipeline_type: of another type where this rank is alone (a dry run).
    """
    parallelism, traffic = config.parallelism, Traffic(fused_calls=building.fused_calls)
    plan = stage_plan(config) if mesh.size("pp") > 1 else None
    if plan is not None:
        meta = torch.device("meta")
        decoder = decoder_of_rank(config.model, building.compute_dtype, plan, mesh.index("pp"), meta)
    else:
        with torch.device("meta"):
            decoder = Decoder(config.model, building.compute_dtype)
    placements: Mapping[str, Placement] = tensor_parallel(
        decoder,
        mesh,
        parallelism.sequence_parallel,
        traffic,
        building.tp_chunks,
        async_input_gradient=building.tp_async_input_gradient,
        fused_calls=building.fused_calls,
    )
    tensor_ranks = mesh.group("tp")
    if building.fused_calls is not None and tensor_ranks is not None:
        meet(tensor_ranks, device)
    decoder.to_empty(device=device)
    if building.embedding_offload is not None:
        building.embedding_offload.take_home(decoder)
    pipeline = None
    if plan is not None:
        shards = mesh.size("tp") if parallelism.sequence_parallel else 1
        pipeline = pipeline_type(
            decoder, plan, parallelism.pipeline_schedule, mesh, device, traffic, sequence_shards=shards
        )
        placements = pipeline.placements(placements)
    sync = gradient_sync(
        decoder,
        mesh,
        traffic,
        zero_stage=parallelism.zero_stage,
        placements=placements,
        # In a pipeline buckets hide nothing, but they still bound the memory of what is being reduced.
        bucket_size_mb=(
            config.overlap.bucket_size_mb if pipeline is not None else building.bucket_size_mb or 0.0
        ),
        reduce_each_micro_batch=parallelism.reduce_each_micro_batch,
        wire_dtype=building.wire_dtype,
        overlap_param_gather=building.overlap_param_gather,
        prefetch_blocks=building.prefetch_blocks,
        blocks=list(decoder.blocks.values()),
        stages=[(part, list(part.blocks.values())) for part in pipeline.modules]
        if pipeline is not None
        else [],
    )
    return LocalModel(decoder, pipeline, sync)
