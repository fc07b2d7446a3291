"""Messages of a pipeline that are handed over as early as they can be, for schedules that would wait for each.

Torch's schedules of one stage on each rank (GPipe, 1F1B) ask the stage for a message's operations when the next thing
they do is to wait for it: a receive begins when its micro-batch is due, and 1F1B stands until the neighbour has taken
what it sent. Here

* a **send** begins when the stage's output, or its gradient, is there, and is waited for at the end of the step;
* a **receive** begins one micro-batch ahead of the one that is waited for, into the buffer that torch has for it.

Order, number and contents of messages are torch's. Schedules of several stages on a rank do as much by themselves.

For gloo alone, where each message goes its own way. The messages between two ranks over NCCL share a stream: a receive
that waits there, ahead of its time, holds up the send that the neighbour needs before it answers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from drivetrain.config.stages import Schedule
from drivetrain.engine.parallel.traffic import Traffic

__all__ = ["EARLY_SCHEDULES", "CountedStage", "EarlyStage", "early"]

EARLY_SCHEDULES: frozenset[Schedule] = frozenset({"gpipe", "1f1b"})
"""Of one stage on each rank."""


def early(schedule: Schedule, device: torch.device) -> bool:
    """Whether a run's messages go this way."""
    return schedule in EARLY_SCHEDULES and device.type == "cpu"


class CountedStage(PipelineStage):
    """Torch's stage, whose messages are counted."""

    def __init__(self, traffic: Traffic, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._traffic = traffic

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Hidden states of a micro-batch to the next stage."""
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Their gradient to the previous stage."""
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        for send in sends:
            self._traffic.record("pp", "send", send.tensor.nbytes)
        return sends


class EarlyStage(CountedStage):
    """A stage that hands over its messages itself, and leaves its schedule none to wait for.

    Args:
        num_microbatches: of a step.
    """

    def __init__(self, *arguments: Any, num_microbatches: int, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._num_microbatches = num_microbatches
        self._arriving: dict[str, dict[int, list[dist.Work]]] = {"forward": {}, "backward": {}}
        self._leaving: list[tuple[dist.Work, torch.Tensor]] = []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing is left to receive: the micro-batch's hidden states are there."""
        self._receive("forward", fwd_chunk_id, super().get_fwd_recv_ops)
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing is left to receive: the gradient of the micro-batch's output is there."""
        self._receive("backward", bwd_chunk_id, super().get_bwd_recv_ops)
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing is left to send: it is on its way."""
        self._send(super().get_fwd_send_ops(fwd_chunk_id))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing is left to send: it is on its way."""
        self._send(super().get_bwd_send_ops(bwd_chunk_id))
        return []

    def end_step(self) -> None:
        """Wait until the neighbours have taken what was sent."""
        while self._leaving:
            work, _ = self._leaving.pop(0)
            work.wait()
        for direction, arriving in self._arriving.items():
            assert not any(arriving.values()), f"{direction} messages were asked for and never waited for"
            arriving.clear()

    def _receive(self, direction: str, index: int, operations: Callable[[int], Sequence[dist.P2POp]]) -> None:
        arriving = self._arriving[direction]
        for number in range(index, min(index + 2, self._num_microbatches)):
            if number not in arriving:
                arriving[number] = [self._begun(operation) for operation in operations(number)]
        works, arriving[index] = arriving[index], []
        for work in works:
            work.wait()

    def _send(self, operations: Sequence[dist.P2POp]) -> None:
        # A message belongs to whoever sends it until it is taken.
        self._leaving += [(self._begun(operation), operation.tensor) for operation in operations]

    def _begun(self, operation: dist.P2POp) -> dist.Work:
        (work,) = dist.batch_isend_irecv([operation])
        return work
