"""ZeRO's first stage: each rank updates its own rows of every parameter, and all ranks gather the result.

What the optimizer sees of a parameter is a view of its rows: the update is done in place, so there is no second copy
of the weights, and the moments exist for these rows only. Whether a parameter decays is told by its number of
dimensions, which a cut by rows leaves as it is.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.engine.parallel.buckets import ShareLayout, rows_of_part
from drivetrain.engine.parallel.flat_collectives import CountedGroup
from drivetrain.engine.parallel.placement import Placement, Shard

__all__ = ["GATHERS_IN_FLIGHT", "ShardedUpdate"]

GATHERS_IN_FLIGHT = 2
"""One bucket travels while the one before it is copied to its place."""


class ShardedUpdate:
    """This rank's rows of all parameters, bucket by bucket.

    Args:
        named: parameters on this rank, contiguous.
        buckets: indices into ``named``.
        index: this rank's place in ``group``.
        placements: of the parameters, before they are cut by rows.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        buckets: Sequence[Sequence[int]],
        group: CountedGroup,
        index: int,
        placements: Mapping[str, Placement],
    ) -> None:
        self._group = group
        self._members = [[named[number][1] for number in bucket] for bucket in buckets]
        self.layouts = [
            ShareLayout([parameter.shape for parameter in members], group.size) for members in self._members
        ]
        self.rows: list[nn.Parameter] = []
        self.ranges: list[tuple[int, int]] = []
        self.placements: dict[str, Placement] = {}
        for name, parameter in named:
            assert parameter.is_contiguous(), f"{name} is not contiguous"
            first, count = rows_of_part(parameter.shape[0], index, group.size)
            self.ranges.append((first, count))
            self.rows.append(nn.Parameter(parameter.data[first : first + count]))
            whole = placements[name]
            start = whole.slices()[0].start + first
            self.placements[name] = whole.cut(Shard("dp_shard", 0, start, count))
        self._rows_of = [[self.rows[number] for number in bucket] for bucket in buckets]

    @torch.no_grad()
    def gather(self) -> None:
        """Bring every rank's updated rows to all ranks of the group."""
        travelling: list[tuple[int, Tensor, Tensor, dist.Work]] = []
        for number, layout in enumerate(self.layouts):
            rows = self._rows_of[number]
            share = rows[0].new_zeros(layout.share)
            for view, updated in zip(layout.views(share, [part.shape for part in rows]), rows, strict=True):
                view.copy_(updated)
            buffer = share.new_empty(layout.parts, layout.share)
            travelling.append((number, buffer, share, self._group.all_gather(buffer, share)))
            if len(travelling) == GATHERS_IN_FLIGHT:
                self._arrived(*travelling.pop(0))
        for arrival in chain(travelling):
            self._arrived(*arrival)

    def _arrived(self, number: int, buffer: Tensor, _share: Tensor, work: dist.Work) -> None:
        work.wait()
        self.layouts[number].copy_out(buffer, [parameter.data for parameter in self._members[number]])
