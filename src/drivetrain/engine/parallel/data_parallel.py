"""Data parallelism: which way of it a ZeRO stage asks for.

Stages 0 to 2 reduce in buckets of our own. Torch's DistributedDataParallel hands over the same collectives and bytes
(``benchmarks/parallel.py``), but it cannot shard, and under a pipeline schedule it fails at its second step. Stage 3 is
FSDP2.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from drivetrain.engine.parallel.fully_sharded import FullySharded
from drivetrain.engine.parallel.gradient_sync import GradientSync, kept_buffers
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.parallel.zero import AllReducedGradients, ReduceScatteredGradients
from drivetrain.errors import ConfigurationError

__all__ = ["gradient_sync"]


def gradient_sync(
    module: nn.Module,
    mesh: Mesh,
    traffic: Traffic,
    *,
    zero_stage: int,
    placements: Mapping[str, Placement] | None = None,
    bucket_size_mb: float = 25.0,
    reduce_each_micro_batch: bool = False,
    wire_dtype: torch.dtype | None = None,
    overlap_param_gather: bool = False,
    prefetch_blocks: int = 0,
    blocks: Sequence[nn.Module] = (),
    stages: Sequence[tuple[nn.Module, Sequence[nn.Module]]] = (),
    forward_methods: Sequence[str] = ("loss_sum",),
) -> GradientSync:
    """Data parallelism of a ZeRO stage over ``dp``, sharded over ``dp_shard``, for ``module`` with its weights in it.

    With one data-parallel rank there is nothing to share, and every stage is stage 0.

    Args:
        zero_stage: 0 to 3.
        placements: of the parameters over the other dimensions of the mesh; whole where absent.
        bucket_size_mb: MB (1e6 bytes), stages 0 to 2; 0: all gradients in one bucket, reduced after backward.
        wire_dtype: that gradients have while they travel; None: their own.
        overlap_param_gather: stages 1 and 2: updated parameters travel while the next forward pass begins. Whoever
            reads them outside of the module calls ``settle`` first.
        stages: parts of the module that a pipeline schedule runs; nothing is reduced while it does.
        blocks, forward_methods, prefetch_blocks: stage 3, see :class:`FullySharded`.

    Raises:
        ConfigurationError: the module has state besides parameters, which nothing would keep equal over the ranks.
    """
    kept = kept_buffers(module)
    if kept:
        raise ConfigurationError(
            f"buffer {kept[0]} ({len(kept)} in all) changes on each rank by itself and would be saved; register what "
            "never changes with persistent=False, and replace what does (a batch norm by a norm without statistics)"
        )
    placements = placements or {}
    assert zero_stage == 0 or mesh.size("dp_shard") > 1 or mesh.size("dp") == 1, (
        "rule hybrid-shards-are-shared was not checked"
    )
    if zero_stage in (2, 3) and mesh.size("dp_shard") > 1:
        if zero_stage == 3:
            return FullySharded(
                module,
                blocks,
                mesh,
                placements,
                traffic,
                stages=stages,
                forward_methods=forward_methods,
                reduce_each_micro_batch=reduce_each_micro_batch,
                wire_dtype=wire_dtype,
                prefetch_blocks=prefetch_blocks,
            )
        return ReduceScatteredGradients(
            module,
            mesh,
            placements,
            traffic,
            bucket_size_mb=bucket_size_mb,
            reduce_each_micro_batch=reduce_each_micro_batch,
            overlap_param_gather=overlap_param_gather,
            wire_dtype=wire_dtype,
            learn_order=not stages,
        )
    return AllReducedGradients(
        module,
        mesh,
        placements,
        traffic,
        bucket_size_mb=bucket_size_mb,
        reduce_each_micro_batch=reduce_each_micro_batch,
        shard_update=zero_stage >= 1 and mesh.size("dp_shard") > 1,
        overlap_param_gather=overlap_param_gather,
        wire_dtype=wire_dtype,
        learn_order=not stages,
    )
