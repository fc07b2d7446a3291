"""The norm of the gradient of the whole model, of which a rank holds a part: every element counts once.

A part that several ranks hold alike counts on the first of them. Gradients are equal over data-parallel ranks that hold
the same part, so the sum goes over the dimensions that cut the model, and over no other.
"""

from collections.abc import Collection, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.ops.gradient_clip import clip_coefficient, scale_gradients, total_norm
from drivetrain.engine.parallel.flights import flown
from drivetrain.engine.parallel.gradient_sync import Held
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.traffic import Traffic

__all__ = ["clip_held_gradients", "counts_here", "dimensions_of_norm", "norm_of_held"]

_CUTTING = ("tp", "cp", "pp", "dp_shard")


def counts_here(placement: Placement, mesh: Mesh, dims: Collection[str]) -> bool:
    """Whether this rank is the one whose values count, of those that hold the same values along ``dims``."""
    for dim in dims:
        if dim in placement.sharded_over:
            if any(shard.replica for shard in placement.shards if shard.group == dim):
                return False
        elif mesh.index(dim) and (dim != "pp" or dim in placement.replicated):
            # A rank of a pipeline holds what the others do not, unless it says so. Along the other dimensions what is
            # not cut is held by all.
            return False
    return True


def dimensions_of_norm(placements: Mapping[str, Placement], mesh: Mesh) -> tuple[str, ...]:
    """Dimensions of the mesh to sum over, the same on every rank.

    Over data-parallel ranks gradients are equal, unless they are cut: then all of them are.
    """
    cut = {shard.group for placement in placements.values() for shard in placement.shards}
    return tuple(dim for dim in _CUTTING if mesh.size(dim) > 1 and (dim != "dp_shard" or dim in cut))


@torch.no_grad()
def norm_of_held(gradients: Mapping[str, Held], mesh: Mesh, traffic: Traffic) -> Tensor:
    """L2 norm of the gradient of the whole model: a scalar, the same on every rank, without host sync on a GPU.

    Collective over the dimensions that cut the model, one all-reduce of a scalar for each.
    """
    dims = dimensions_of_norm({name: held.placement for name, held in gradients.items()}, mesh)
    if not dims:
        return total_norm([held.tensor for held in gradients.values()])
    counted = [held.tensor for held in gradients.values() if counts_here(held.placement, mesh, dims)]
    any_tensor = next(iter(gradients.values())).tensor
    total = (
        total_norm(counted).square()
        if counted
        else torch.zeros(
            (), dtype=torch.promote_types(any_tensor.dtype, torch.float32), device=any_tensor.device
        )
    )
    for dim in dims:
        group = mesh.group(dim)
        flight = traffic.begin(dim, "all_reduce", total.nbytes, group)
        flown(partial(_sum, total, group), flight)
    return total.sqrt()


def _sum(total: Tensor, group: dist.ProcessGroup | None, go_on: bool) -> dist.Work | None:
    work: dist.Work | None = dist.all_reduce(total, group=group, async_op=go_on)
    return work


@torch.no_grad()
def clip_held_gradients(
    gradients: Mapping[str, Held], max_norm: float, mesh: Mesh, traffic: Traffic
) -> tuple[Tensor, Tensor]:
    """Scale the gradients in place to a global norm of at most ``max_norm``; returns the norm and the factor.

    As :func:`drivetrain.engine.optimizer.clip_gradients`, of which this is the form for several ranks.
    """
    norm = norm_of_held(gradients, mesh, traffic)
    factor = clip_coefficient(norm, max_norm)
    if max_norm:
        scale_gradients([held.tensor for held in gradients.values()], factor)
    return norm, factor
