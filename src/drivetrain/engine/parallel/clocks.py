"""By how much the clocks of the ranks differ, from a few small collectives of all of them.

No rank leaves an all-reduce before the last one has entered it. With times of entering and leaving on each rank's own
clock, what rank r's is ahead of rank 0's lies between ``enter_r - leave_0`` and ``leave_r - enter_0``; the tightest
bounds of several rounds hold. The number of collectives does not depend on the number of ranks.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from drivetrain.engine.parallel.process_group import ProcessGroup

__all__ = ["Alignment", "align", "offset_from"]

_ROUNDS = 12


@dataclass(frozen=True)
class Alignment:
    """Of one rank's ``time.perf_counter_ns()`` against rank 0's.

    Attributes:
        offset_ns: what it is ahead.
        error_ns: the offset lies within this of the truth, when it was measured.
        at_ns: when that was, by its own clock. Clocks of different hosts drift apart afterwards.
    """

    offset_ns: int
    error_ns: int
    at_ns: int


def align(group: ProcessGroup) -> Alignment:
    """Measure it. Collective over all ranks: a dozen sums of one number, and one gathering of two dozen."""
    if group.size == 1:
        return Alignment(0, 0, time.perf_counter_ns())
    own: list[int] = []
    for _ in range(_ROUNDS):
        entered = time.perf_counter_ns()
        group.barrier()
        own += [entered, time.perf_counter_ns()]
    mine = torch.tensor(own, dtype=torch.int64)
    found = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(found, mine)
    # Rank 0 against itself needs no bounds.
    return offset_from(found[0].tolist(), own) if group.ranks.rank else Alignment(0, 0, own[-1])


def offset_from(first: Sequence[int], own: Sequence[int]) -> Alignment:
    """The alignment of one rank.

    Args:
        first: of rank 0, times of entering and leaving each round, one after the other, ns.
        own: the same of this rank.
    """
    lowest = max(enter - leave for enter, leave in zip(own[0::2], first[1::2], strict=True))
    highest = min(leave - enter for leave, enter in zip(own[1::2], first[0::2], strict=True))
    return Alignment((lowest + highest) // 2, max(0, (highest - lowest + 1) // 2), own[-1])
