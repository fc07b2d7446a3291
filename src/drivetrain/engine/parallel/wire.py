"""Gradients that are narrower while they travel than while they are summed: half the bytes, sums in their own dtype.

A library's all-reduce in bf16 rounds after every addition, n - 1 times over n ranks on a ring. Here every rank gets the
parts of one share from all the others, rounded once, and adds them up in the gradients' dtype, rank by rank, so that
the order is the same at every place. For a whole sum each rank's share is then rounded a second time and gathered: on
the wire these two halves are what an all-reduce on a ring is, and they are counted as one.

What the rounding costs is measured, not believed: the first reduction of a run is made a second time in full precision,
outside of the counted traffic (:class:`WireError`).
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from drivetrain.engine.parallel.flat_collectives import CountedGroup, all_gather_flat, reduce_scatter_flat
from drivetrain.engine.parallel.flights import Flight, watched

__all__ = [
    "WIRE_SPAN",
    "LowPrecisionScatter",
    "LowPrecisionSum",
    "Travelling",
    "WireError",
    "packing",
    "scatter_sum",
    "whole_sum",
]

WIRE_SPAN = "drivetrain/wire/"
"""Span of the packing of a bucket for the wire, followed by the dtype: ``drivetrain/wire/bf16``."""
_NAMES = {torch.bfloat16: "bf16"}


def packing(dtype: torch.dtype) -> record_function:
    """The span around whatever puts gradients into a buffer of `dtype`."""
    return record_function(f"{WIRE_SPAN}{_NAMES[dtype]}")


class Travelling(Protocol):
    """Something that is under way."""

    def wait(self) -> object:
        """Return when it has arrived."""


class LowPrecisionScatter:
    """A reduce-scatter whose values travel in the dtype of ``buffer`` and are added up in that of ``share``.

    Args:
        share: (n,), the result.
        buffer: (size, n), narrower; row r goes to rank r.
    """

    def __init__(self, group: CountedGroup, share: Tensor, buffer: Tensor) -> None:
        assert buffer.shape == (group.size, len(share)), f"{tuple(buffer.shape)} for {len(share)} a rank"
        self._share = share
        self._received: Tensor | None = None
        self._sent = buffer
        if group.in_levels:
            # Narrow between machines, too; added up in the share's dtype at both ends.
            self._work = group.reduce_scatter(share, buffer)
            return
        flight = group.begin("reduce_scatter", buffer.nbytes)
        self._received, work = _exchanged(group, buffer)
        self._work = watched(work, flight)

    def wait(self) -> None:
        """Return when ``share`` is the sum."""
        self._work.wait()
        if self._received is not None:
            _add_up(self._share, self._received)


class LowPrecisionSum:
    """An all-reduce of ``tensor`` in place, whose values travel in ``dtype``; equal on all ranks to the bit.

    Its second half is begun by :meth:`go_on`, which waits for the first: at the same place of the program on all ranks.
    """

    def __init__(self, group: CountedGroup, tensor: Tensor, dtype: torch.dtype) -> None:
        self._group = group
        self._tensor = tensor
        share = -(-tensor.numel() // group.size)
        with packing(dtype):
            self._sent = tensor.new_zeros(group.size * share, dtype=dtype)
            self._sent[: tensor.numel()].copy_(tensor.view(-1))
        self._total = tensor.new_empty(share)
        self._gathering: dist.Work | None = None
        self._flight: Flight | None = None
        self._received: Tensor | None = None
        if group.in_levels:
            # Both halves are counted, and followed, by level.
            self._work = group.reduce_scatter(self._total, self._sent.view(group.size, share))
            return
        self._flight = group.begin("all_reduce", tensor.numel() * dtype.itemsize)
        self._received, self._work = _exchanged(group, self._sent.view(group.size, share))

    def go_on(self) -> None:
        """Wait for the first half and begin the second; nothing where it has begun."""
        if self._gathering is not None:
            return
        if self._flight is None:
            self._work.wait()
        else:
            with self._flight.waiting():
                self._work.wait()
            self._flight.completed_ns = None  # the other half is to come
        if self._received is not None:
            _add_up(self._total, self._received)
        # What was sent has arrived: its memory takes the result.
        self._share = self._total.to(self._sent.dtype)
        del self._total
        if self._received is None:
            self._gathering = self._group.all_gather(self._sent.view(self._group.size, -1), self._share)
            return
        self._received = None
        work = all_gather_flat(self._sent, self._share, group=self._group.group, async_op=True)
        assert work is not None, "this rank is not in the group"
        self._gathering = watched(work, self._flight)

    def wait(self) -> None:
        """Return when the tensor is the sum."""
        self.go_on()
        assert self._gathering is not None
        self._gathering.wait()
        self._tensor.view(-1).copy_(self._sent[: self._tensor.numel()])


class WireError:
    """How far sums of narrow values were from sums of whole ones, over everything that was added."""

    def __init__(self) -> None:
        self._squares: Tensor | None = None
        self._relative: float | None = None

    @torch.no_grad()
    def add(self, found: Tensor, exact: Tensor) -> None:
        """One bucket, or this rank's share of it. No host synchronisation."""
        difference = (found - exact).double().square().sum()
        squares = torch.stack([difference, exact.double().square().sum()])
        self._squares = squares if self._squares is None else self._squares + squares

    def relative(self, group: dist.ProcessGroup | None) -> float | None:
        """``‖found - exact‖ / ‖exact‖``, each over all ranks; None where nothing was added, or all of it was zero.
        Collective over ``group`` when it is first asked."""
        if self._relative is None and self._squares is not None:
            dist.all_reduce(self._squares, group=group)
            difference, exact = self._squares.sqrt().tolist()
            self._relative = difference / exact if exact else None
            self._squares = None
        return self._relative


def whole_sum(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over the ranks in the tensor's own dtype, to compare with; not counted."""
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


def scatter_sum(buffer: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's row (n,) of the sum of ``buffer`` (size, n), to compare with; not counted."""
    share = buffer.new_empty(buffer.shape[1])
    reduce_scatter_flat(share, buffer.view(-1), group=group)
    return share


def _exchanged(group: CountedGroup, buffer: Tensor) -> tuple[Tensor, dist.Work]:
    """Begin to bring row r of every rank's ``buffer`` (size, n) to rank r, as rows by rank."""
    received = torch.empty_like(buffer)
    work = dist.all_to_all_single(received.view(-1), buffer.view(-1), group=group.group, async_op=True)
    assert work is not None, "this rank is not in the group"
    return received, work


def _add_up(total: Tensor, rows: Tensor) -> None:
    """``total`` (n,) becomes the sum of ``rows`` (size, n) in its own dtype, rank by rank."""
    total.copy_(rows[0])
    for row in rows[1:]:
        total.add_(row)
