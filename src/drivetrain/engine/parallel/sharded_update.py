"""ZeRO's first stage: each rank updates its own rows of every parameter, and all ranks gather the result.

What the optimizer sees of a parameter is a view of its rows: the update is done in place, so there is no second copy
of the weights, and the moments exist for these rows only. Whether a parameter decays is told by its number of
dimensions, which a cut by rows leaves as it is.

Rows are cut parameter by parameter and do not depend on buckets; buckets say what travels together, and may be told
later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from drivetrain.engine.parallel.buckets import ShareLayout, rows_of_part
from drivetrain.engine.parallel.flat_collectives import CountedGroup
from drivetrain.engine.parallel.placement import Placement, Shard

__all__ = ["BLOCKING_GATHER", "GATHERS_IN_FLIGHT", "Gathering", "ShardedUpdate"]

GATHERS_IN_FLIGHT = 2
"""One bucket travels while the one before it is copied to its place."""

BLOCKING_GATHER = "drivetrain/gather/blocking"
"""Span of a gather of all parameters that the rank stands still for."""


@dataclass(frozen=True)
class Gathering:
    """A bucket that is under way."""

    number: int
    buffer: Tensor
    share: Tensor
    work: dist.Work


class ShardedUpdate:
    """This rank's rows of all parameters, bucket by bucket.

    Args:
        named: parameters on this rank, contiguous.
        index: this rank's place in ``group``.
        placements: of the parameters, before they are cut by rows.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: CountedGroup,
        index: int,
        placements: Mapping[str, Placement],
    ) -> None:
        self._group = group
        self._parameters = [parameter for _, parameter in named]
        self.layouts: list[ShareLayout] = []
        self._buckets: Sequence[Sequence[int]] = ()
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

    def lay_out(self, buckets: Sequence[Sequence[int]]) -> None:
        """What travels together: indices of parameters, in the order in which backward finishes them."""
        self._buckets = buckets
        self.layouts = [
            ShareLayout([self._parameters[number].shape for number in bucket], self._group.size)
            for bucket in buckets
        ]

    @property
    def order_of_use(self) -> list[int]:
        """Numbers of the buckets as forward comes to need them: what backward finishes last, forward uses first."""
        return list(reversed(range(len(self.layouts))))

    @torch.no_grad()
    def gather(self) -> None:
        """Bring every rank's updated rows to all ranks of the group."""
        travelling: list[Gathering] = []
        with record_function(BLOCKING_GATHER):
            for number in self.order_of_use:
                travelling.append(self.start(number))
                if len(travelling) == GATHERS_IN_FLIGHT:
                    self.arrive(travelling.pop(0))
            for gathering in travelling:
                self.arrive(gathering)

    @torch.no_grad()
    def start(self, number: int) -> Gathering:
        """Send this rank's rows of a bucket on their way."""
        layout = self.layouts[number]
        rows = [self.rows[index] for index in self._buckets[number]]
        share = rows[0].new_zeros(layout.share)
        for view, updated in zip(layout.views(share, [part.shape for part in rows]), rows, strict=True):
            view.copy_(updated)
        buffer = share.new_empty(layout.parts, layout.share)
        return Gathering(number, buffer, share, self._group.all_gather(buffer, share))

    @torch.no_grad()
    def arrive(self, gathering: Gathering) -> None:
        """Wait for a bucket, and put its values in their place."""
        gathering.work.wait()
        members = [self._parameters[index].data for index in self._buckets[gathering.number]]
        self.layouts[gathering.number].copy_out(gathering.buffer, members)
