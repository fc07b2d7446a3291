"""Parameters in buckets, and buckets in equal shares: where each value lies in the buffers that travel.

A bucket is a few neighbouring parameters whose gradients travel together. Sharded over n ranks, each parameter is cut
by rows (dimension 0): part i is rows ``[i c, (i + 1) c)`` with ``c = ceil(rows / n)``, so the last parts may be short
or empty. FSDP2 cuts the same way. A share of a bucket is the i-th part of each of its parameters, padded to c rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["ShareLayout", "buckets_of", "order_of_registration", "rows_of_part"]

_BYTES_IN_MB = 1e6
_LAST_BUCKET = 1 / 25
"""Size of the last bucket over that of the others. What becomes ready last travels when nothing is left to compute:
all of it is waited for. Torch's DistributedDataParallel has the same relation of its small bucket to the others (1 MiB
to 25 MiB), though it makes the one small that starts first."""


def order_of_registration(count: int) -> list[int]:
    """The order in which backward finishes ``count`` parameters that forward uses as they were registered."""
    return list(reversed(range(count)))


def buckets_of(
    sizes: Sequence[int], bucket_size_mb: float, order: Sequence[int] | None = None
) -> list[list[int]]:
    """Indices of parameters in the order in which backward finishes them, cut into buckets.

    A bucket is closed once it has reached its size, so it may exceed it by its last parameter (the rule of torch's
    DistributedDataParallel). The last bucket has at most 1/25 of the size, or one parameter: the last one. What one
    bucket holds is one.

    Args:
        sizes: bytes of the parameters' gradients, in the order of registration.
        bucket_size_mb: MB (1e6 bytes); 0: all in one bucket.
        order: in which their gradients become ready; by default as :func:`order_of_registration` says.
    """
    order = order_of_registration(len(sizes)) if order is None else list(order)
    assert sorted(order) == list(range(len(sizes))), "an order names each parameter once"
    limit = bucket_size_mb * _BYTES_IN_MB
    if not order:
        return []
    if not bucket_size_mb or sum(sizes) <= limit:
        return [order]
    last = _first_of_last(sizes, order, limit * _LAST_BUCKET)
    buckets: list[list[int]] = []
    filled = limit
    for index in order[:last]:
        if filled >= limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return [*buckets, order[last:]]


def _first_of_last(sizes: Sequence[int], order: Sequence[int], limit: float) -> int:
    """Place in ``order`` from which everything fits into ``limit`` bytes; the last place at least."""
    place, filled = len(order) - 1, sizes[order[-1]]
    while place and filled + sizes[order[place - 1]] <= limit:
        place -= 1
        filled += sizes[order[place]]
    return place


def rows_of_part(rows: int, part: int, parts: int) -> tuple[int, int]:
    """First row and number of rows of part ``part`` of ``parts``."""
    most = -(-rows // parts)
    first = min(part * most, rows)
    return first, min(most, rows - first)


class ShareLayout:
    """A bucket as a buffer of (parts, share) elements: row i is share i, the i-th part of each parameter in turn.

    Attributes:
        parts: ranks that share the bucket.
        share: elements of a share, padding included.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], parts: int) -> None:
        assert all(shapes), "a scalar has no rows"
        self.parts = parts
        self._widths = [-(-shape[0] // parts) * _product(shape[1:]) for shape in shapes]
        self._starts = [sum(self._widths[:index]) for index in range(len(shapes))]
        self.share = sum(self._widths)

    def copy_in(self, tensors: Sequence[Tensor | None], buffer: Tensor) -> None:
        """Whole tensors into ``buffer`` (parts, share); None stands for zeros, and so does padding."""
        for tensor, start, width in zip(tensors, self._starts, self._widths, strict=True):
            target = buffer[:, start : start + width]
            if tensor is None:
                target.zero_()
                continue
            flat = tensor.reshape(-1)
            whole, rest = divmod(flat.numel(), width)
            target[:whole].copy_(flat[: whole * width].view(whole, width))
            if whole < self.parts:
                target[whole, :rest].copy_(flat[whole * width :])
                target[whole, rest:].zero_()
                target[whole + 1 :].zero_()

    def copy_out(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """``buffer`` (parts, share) into whole, contiguous tensors."""
        for tensor, start, width in zip(tensors, self._starts, self._widths, strict=True):
            source = buffer[:, start : start + width]
            flat = tensor.view(-1)
            whole, rest = divmod(flat.numel(), width)
            flat[: whole * width].view(whole, width).copy_(source[:whole])
            if rest:
                flat[whole * width :].copy_(source[whole, :rest])

    def views(self, share: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The parts of one share (share,) as tensors of ``shapes``, which leave the padding out."""
        return [
            share[start : start + _product(shape)].view(*shape)
            for start, shape in zip(self._starts, shapes, strict=True)
        ]


def _product(sizes: Sequence[int]) -> int:
    return int(torch.Size(sizes).numel())
