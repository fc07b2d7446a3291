"""A process group whose link is a model: collectives really happen, and time is counted instead of measured.

Whether communication hides depends on the order in which it is handed over and waited for, and that can be held to the
last digit without a network: :class:`ModelledGroup` passes each collective on to a real group, and notes in a
:class:`Schedule` when it would have begun and ended on a link of a given rate. Computation is told to the schedule,
with the seconds it is to take. Nothing sleeps, no clock is read; the same program has the same schedule anywhere.

The model: a rank's computation is one line of time, and a group's link another. A collective begins when the last rank
of the group has handed it over and the one before it has left the link, and takes ``latency + bytes on the wire /
rate``; a wait moves the rank's time on to its end. Bytes on the wire are those of the ring algorithms (Chan et al.
2007, doi:10.1002/cpe.1206), so that the model and a formula on paper agree.

For tests; nothing of a run uses it. How much really hides is measured in the network lab.
"""

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Entry", "LinkModel", "ModelledGroup", "Schedule"]

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


@dataclass(frozen=True)
class LinkModel:
    """What a rank sends through.

    Attributes:
        bytes_per_s: in each direction at once.
        latency_s: that each collective takes in any case.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, kind: Kind, bytes: int, ranks: int) -> float:
        """What a collective takes.

        Args:
            bytes: of the tensor that all ranks have in the end (all-reduce, all-gather, broadcast), or had at first
                (reduce-scatter, all-to-all).
        """
        share = (ranks - 1) / ranks
        passed = {
            "all_reduce": 2 * share,
            "all_gather": share,
            "reduce_scatter": share,
            "all_to_all": share,
            "broadcast": 1.0,
        }[kind]
        return self.latency_s + passed * bytes / self.bytes_per_s


@dataclass(frozen=True)
class Entry:
    """One thing of a schedule, in the order in which this rank did them.

    Attributes:
        what: ``compute``, ``issue`` (a collective is handed over) or ``wait`` (until it is complete).
        name: of the computation, or of the group and the collective's number in it: ``dp 3``.
        begin_s, end_s: on the rank's own line of time; equal for ``issue``.
    """

    what: Literal["compute", "issue", "wait"]
    name: str
    begin_s: float
    end_s: float


@dataclass
class Schedule:
    """What one rank did, and when, on its line of time. One for all groups of the rank.

    Attributes:
        now_s: where the line has come to.
        entries: everything so far.
        wire_s: for how long the links of all groups have carried a collective that was waited for.
    """

    now_s: float = 0.0
    entries: list[Entry] = field(default_factory=list)
    wire_s: float = 0.0

    def compute(self, name: str, seconds: float) -> None:
        """The rank computes for ``seconds``."""
        begin = self.now_s
        self.now_s += seconds
        self.entries.append(Entry("compute", name, begin, self.now_s))

    def issued(self, name: str) -> None:
        """A collective is handed over."""
        self.entries.append(Entry("issue", name, self.now_s, self.now_s))

    def waited(self, name: str, until_s: float) -> None:
        """The rank has waited for a collective that ended at ``until_s``."""
        begin = self.now_s
        self.now_s = max(begin, until_s)
        self.entries.append(Entry("wait", name, begin, self.now_s))

    @property
    def order(self) -> list[str]:
        """The entries in words, without times: ``compute block 1``, ``issue dp 0``."""
        return [f"{entry.what} {entry.name}" for entry in self.entries]

    @property
    def compute_s(self) -> float:
        """Computation in all."""
        return sum(entry.end_s - entry.begin_s for entry in self.entries if entry.what == "compute")

    @property
    def exposed_s(self) -> float:
        """Time in which the rank did nothing but wait."""
        return sum(entry.end_s - entry.begin_s for entry in self.entries if entry.what == "wait")


@dataclass(eq=False)
class _Transfer:
    """A collective that is under way; ``handed_over`` holds each rank's time of it once ``told`` is complete."""

    name: str
    seconds: float
    handed_over: list[Tensor]
    told: dist.Work
    end_s: float | None = None


class _ModelledWork(dist.Work):
    def __init__(
        self, group: "ModelledGroup", transfer: _Transfer, inner: dist.Work, outputs: list[Tensor]
    ) -> None:
        super().__init__()
        self._group = group
        self._transfer = transfer
        self._inner = inner
        self._outputs = outputs
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert timeout is None, "the model has no time limit of its own"
        self._inner.wait()
        self._group.wait_for(self._transfer)
        if not self._future.done():
            self._future.set_result(self._outputs)
        return True

    def is_completed(self) -> bool:
        """Whether a wait for it would cost nothing. May block until the other ranks have handed it over, too."""
        return self._group.end_of(self._transfer) <= self._group.schedule.now_s

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        return self._future

    def result(self) -> list[Tensor]:
        return self._outputs


class ModelledGroup(dist.ProcessGroup):
    """A group of ranks behind a modelled link.

    Every rank of ``inner`` makes one, and hands over the same collectives in the same order, as with any group. It
    serves wherever a group is passed on to ``torch.distributed``'s functions, without being registered anywhere.

    Args:
        inner: a gloo group of the same ranks, which does the work. Each collective costs a second one, of 8 bytes.
        link: of each of its ranks.
        schedule: of this rank; several groups may share it.
        name: in the schedule.
    """

    def __init__(self, inner: dist.ProcessGroup, link: LinkModel, schedule: Schedule, name: str) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.schedule = schedule
        self._inner = inner
        self._link = link
        self._label = name
        self._count = 0
        self._free_s = 0.0
        self._unsettled: deque[_Transfer] = deque()

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        bytes = sum(tensor.nbytes for tensor in tensors)
        return self._hand_over(
            "all_reduce", bytes, self._inner.allreduce(tensors, *_given(opts)), list(tensors)
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        bytes = sum(tensor.nbytes for tensor in tensors)
        return self._hand_over(
            "broadcast", bytes, self._inner.broadcast(tensors, *_given(opts)), list(tensors)
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        work = self._inner._allgather_base(output, input, *_given(opts))
        return self._hand_over("all_gather", output.nbytes, work, [output])

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> dist.Work:
        work = self._inner._reduce_scatter_base(outputTensor, inputTensor, *_given(opts))
        return self._hand_over("reduce_scatter", inputTensor.nbytes, work, [outputTensor])

    def alltoall_base(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
    ) -> dist.Work:
        work = self._inner.alltoall_base(
            output_tensor, input_tensor, output_split_sizes, input_split_sizes, *_given(opts)
        )
        return self._hand_over("all_to_all", input_tensor.nbytes, work, [output_tensor])

    # The names that torch before 2.13, or some of its functions, call them by.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._inner.barrier(*_given(opts))

    def getBackendName(self) -> str:
        return "modelled"

    def _hand_over(self, kind: Kind, bytes: int, inner: dist.Work, outputs: list[Tensor]) -> dist.Work:
        name = f"{self._label} {self._count}"
        self._count += 1
        self.schedule.issued(name)
        own = torch.tensor([self.schedule.now_s], dtype=torch.float64)
        handed_over = [torch.empty_like(own) for _ in range(self.size())]
        told = self._inner.allgather([handed_over], [own])
        transfer = _Transfer(name, self._link.seconds(kind, bytes, self.size()), handed_over, told)
        self._unsettled.append(transfer)
        return _ModelledWork(self, transfer, inner, outputs)

    def end_of(self, transfer: _Transfer) -> float:
        """When a collective is complete, in seconds of the line of time; settles those before it on the link."""
        while transfer.end_s is None:
            first = self._unsettled.popleft()
            first.told.wait()
            begin = max(self._free_s, *(float(time.item()) for time in first.handed_over))
            self._free_s = first.end_s = begin + first.seconds
            self.schedule.wire_s += first.seconds
        return transfer.end_s

    def wait_for(self, transfer: _Transfer) -> None:
        """The rank's time goes on to the end of the collective."""
        self.schedule.waited(transfer.name, self.end_of(transfer))


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)
