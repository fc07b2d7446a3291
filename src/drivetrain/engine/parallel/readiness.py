"""In which order gradients become ready, seen in a first backward pass and made the same on all ranks.

Buckets are cut by this order, and no gradient travels before it is known: a step that is reduced in other buckets than
the next would round otherwise, where a library adds in an order that depends on the place in a bucket. So all steps of
a run have the same buckets, and a run that is resumed learns the same order anew from the same graph.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from drivetrain.engine.parallel.buckets import order_of_registration

__all__ = ["Arrivals", "agreed_order"]


class Arrivals:
    """Gradients in the order in which each came for the first time.

    Args:
        count: of parameters.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen: dict[int, None] = {}

    def note(self, index: int) -> None:
        """A gradient of parameter ``index`` is there."""
        self._seen.setdefault(index)

    def order(self) -> list[int]:
        """All parameters. Those that nothing was seen of come last: a bucket that waits for a gradient which does not
        come can be sent when backward has ended, and those behind it no sooner."""
        return [
            *self._seen,
            *(index for index in order_of_registration(self._count) if index not in self._seen),
        ]


def agreed_order(own: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The order that the first rank of ``group`` has seen, on all of them. Collective.

    Ranks may see different ones, where a branch of the model depends on the data; buckets must be the same.
    """
    order = torch.tensor(list(own), dtype=torch.int64)
    dist.broadcast(order, group=group, group_src=0)
    return [int(index) for index in order.tolist()]
