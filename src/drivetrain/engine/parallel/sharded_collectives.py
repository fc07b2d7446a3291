"""The collectives that FSDP2 asks for, handed over by us: counted, and on a CPU beside the computation.

On CUDA FSDP2 has streams of its own. On a CPU it has none and waits for each collective where it hands it over, unless
a gather returns its work: then it is waited for where a block needs its parameters. FSDP2 never waits for a
reduce-scatter; what it gives back is not read before the optimizer, so that it may travel behind backward here, as long
as somebody waits in the end (:meth:`ShardReduction.settle`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.parallel.flat_collectives import CountedGroup
from drivetrain.engine.parallel.wire import (
    LowPrecisionScatter,
    Travelling,
    WireError,
    packing,
    scatter_sum,
)

__all__ = ["ShardGather", "ShardReduction"]

_BUFFERS_IN_FLIGHT = 2
"""Units whose gradients travel at once. More would only wait in the same queue, and hold memory."""


class _Shards:
    """Buffers, and the group that counts."""

    def __init__(self, group: CountedGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def counted(self, group: dist.ProcessGroup) -> CountedGroup:
        """``group``, always the same one."""
        known = self._group.group
        assert known is not None
        assert known.group_name == group.group_name, "shards lie in one group"
        return self._group


class ShardGather(_Shards):
    """FSDP2's all-gather.

    Args:
        ahead: gathers on a CPU return before they have ended.
    """

    def __init__(self, group: CountedGroup, *, ahead: bool) -> None:
        super().__init__(group)
        self._ahead = ahead

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        counted = self.counted(group)
        work = counted.all_gather(output_tensor.view(counted.size, -1), input_tensor)
        if async_op or (self._ahead and output_tensor.device.type == "cpu"):
            return work
        work.wait()
        return None


@dataclass(frozen=True)
class _UnderWay:
    work: Travelling
    tensors: tuple[Tensor, ...]
    share: Tensor
    exact: Tensor | None


class ShardReduction(_Shards):
    """FSDP2's reduce-scatter, a sum.

    Args:
        behind: on a CPU, return before it has ended. Nobody may read its result before :meth:`settle`.
        wire_dtype: that gradients have while they travel; None: their own.
        error: gets the first step's difference to sums in full precision.
    """

    def __init__(
        self, group: CountedGroup, *, behind: bool, wire_dtype: torch.dtype | None, error: WireError | None
    ) -> None:
        super().__init__(group)
        self._behind = behind
        self._wire_dtype = wire_dtype
        self._error = error
        self._measuring = error is not None
        self._under_way: list[_UnderWay] = []

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, f"gradients are sums, not {op}"
        assert not async_op, "nobody would wait"
        self._under_way.append(self._begin(output_tensor, input_tensor, self.counted(group)))
        most = _BUFFERS_IN_FLIGHT if self._behind and input_tensor.device.type == "cpu" else 0
        while len(self._under_way) > most:
            self._arrive()

    def _begin(self, share: Tensor, whole: Tensor, group: CountedGroup) -> _UnderWay:
        buffer = whole.view(group.size, -1)
        if self._wire_dtype is None:
            return _UnderWay(group.reduce_scatter(share, buffer), (buffer,), share, None)
        exact = scatter_sum(buffer, group.group) if self._measuring else None
        with packing(self._wire_dtype):
            narrow = buffer.to(self._wire_dtype)
        return _UnderWay(LowPrecisionScatter(group, share, narrow), (narrow,), share, exact)

    def _arrive(self) -> None:
        first = self._under_way.pop(0)
        first.work.wait()
        if first.exact is not None:
            assert self._error is not None
            self._error.add(first.share, first.exact)

    def settle(self) -> None:
        """Return when every sum is there."""
        while self._under_way:
            self._arrive()
        self._measuring = False
