"""Reduce-scatter of tensors on a CPU over gloo, whose own is an all-reduce inside.

Each rank sends row r of its buffer to rank r, an all-to-all, and adds up the rows that arrive. With n ranks,
``(n - 1) / n`` of the buffer leaves a rank, the least that a reduce-scatter can do and half of what an all-reduce
sends, and a rank adds up what it keeps and no more.

Rows are added in the order of ranks, so that the sum is the same whatever arrives first. Elements of 16 bits are added
in the result's dtype or, if that has 16 bits too, in fp32 and rounded once.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.failures import explained_in
from drivetrain.engine.parallel.streams import Event, Stream

__all__ = ["add_in_order", "begin_exchange_and_add", "exchange_and_add", "exchanges"]


def exchanges(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether this reduce-scatter is the one for tensors on ``device``: they are on a CPU, and ``group`` is gloo's."""
    if device.type != "cpu":
        return False
    # "gloo" as "cpu:gloo,cuda:gloo,...", or what was given: "cpu:gloo,cuda:nccl".
    backends = dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))
    return backends.get("cpu") == "gloo"


def exchange_and_add(share: Tensor, buffer: Tensor, group: dist.ProcessGroup | None) -> None:
    """Put the sum over the ranks of row r of their ``buffer`` into ``share`` of rank r.

    Args:
        share: (n,), of the buffer's dtype, or fp32 or fp64 where that has 16 bits.
        buffer: (size, n), contiguous, equally large on all ranks. It is read until this returns.
    """
    arrived = torch.empty_like(buffer)
    dist.all_to_all_single(arrived, buffer, group=group)
    add_in_order(arrived, share)


def begin_exchange_and_add(
    share: Tensor,
    buffer: Tensor,
    group: dist.ProcessGroup | None,
    stream: Stream,
    *,
    name: str,
    landed: Callable[[], None] | None = None,
) -> Event:
    """Begin :func:`exchange_and_add`; returns its end.

    Rows travel from now on, on gloo's threads; ``stream`` waits for them and adds them up, beside what the caller
    computes meanwhile. Its order is that of the calls.

    Args:
        name: of the group, in errors.
        landed: called when the sum is there.
    """
    arrived = torch.empty_like(buffer)
    work = dist.all_to_all_single(arrived, buffer, group=group, async_op=True)
    assert work is not None, "this rank is not in the group"

    def add() -> None:
        with explained_in("reduce-scatter", name, group):
            work.wait()
        add_in_order(arrived, share)
        if landed is not None:
            landed()

    return stream.run(add, tensors=(share, buffer, arrived))


@torch.no_grad()
def add_in_order(rows: Tensor, total: Tensor) -> None:
    """Add up ``rows`` (size, n), the first to the second, the third to that and so on, into ``total`` (n,)."""
    narrow = rows.dtype in (torch.bfloat16, torch.float16)
    assert total.dtype == rows.dtype or (narrow and total.dtype in (torch.float32, torch.float64)), (
        f"a sum of {rows.dtype} goes into {total.dtype}"
    )
    dtype = torch.float32 if total.dtype == rows.dtype and narrow else total.dtype
    into = total if total.dtype == dtype else total.new_empty(total.shape, dtype=dtype)
    if rows.dtype == dtype and len(rows) > 1:
        torch.add(rows[0], rows[1], out=into)
        rest = rows[2:]
    else:
        into.copy_(rows[0])
        rest = rows[1:]
    for row in rest:
        into.add_(row)
    if into is not total:
        total.copy_(into)
