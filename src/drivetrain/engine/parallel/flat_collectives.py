"""All-gather and reduce-scatter of flat buffers, counted; under the names that torch of this version has for them."""

import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.parallel.traffic import Traffic

__all__ = ["CountedGroup", "all_gather_flat", "reduce_scatter_flat"]

# Torch 2.13 renamed both, and warns of the former names.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CountedGroup:
    """A process group whose collectives are counted under the name of its dimension of the mesh.

    Args:
        group: None: a single rank, whose collectives must not be called.
        name: of the dimension: "dp", "dp_shard" or "dp_replicate".
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str, traffic: Traffic) -> None:
        self.group = group
        self.size = 1 if group is None else group.size()
        self._name = name
        self._traffic = traffic

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """Begin to sum ``tensor`` over the ranks in place."""
        self._traffic.record(self._name, "all_reduce", tensor.nbytes)
        return _begun(dist.all_reduce(tensor, group=self.group, async_op=True))

    def reduce_scatter(self, share: Tensor, buffer: Tensor) -> dist.Work:
        """Begin to sum ``buffer`` (size, n) over the ranks; row r of the sum goes to ``share`` (n,) of rank r."""
        self._traffic.record(self._name, "reduce_scatter", buffer.nbytes)
        return _begun(reduce_scatter_flat(share, buffer.view(-1), group=self.group, async_op=True))

    def all_gather(self, buffer: Tensor, share: Tensor) -> dist.Work:
        """Begin to put ``share`` (n,) of rank r into row r of ``buffer`` (size, n) on every rank."""
        self._traffic.record(self._name, "all_gather", share.nbytes)
        return _begun(all_gather_flat(buffer.view(-1), share, group=self.group, async_op=True))


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
