"""Collectives of flat buffers under the names that torch of this version has for them."""

import torch.distributed as dist

__all__ = ["all_gather_flat", "reduce_scatter_flat"]

# Torch 2.13 renamed both, and warns of the former names.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
