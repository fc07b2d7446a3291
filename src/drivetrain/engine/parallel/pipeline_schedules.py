"""Torch's pipeline schedules, and what is changed in them.

With several stages on a rank a schedule is a table: for each rank its passes F (forward), B (backward), or I and W
(backward for the inputs alone, for the weights alone), between them messages, gathering (UNSHARD) and dropping
(RESHARD) of sharded parameters, and REDUCE_GRAD where a stage's gradients are complete. The changes are made there,
and leave the order of messages as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_F,
    UNSHARD,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from drivetrain.config.stages import Schedule

__all__ = ["build_schedule", "join_backward", "leave_out_backward"]

_OF_FORWARD = frozenset({FORWARD, SEND_F, RECV_F, UNSHARD, RESHARD})
_PASSES = frozenset({FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT})


def build_schedule(
    name: Schedule, stages: list[Any], num_microbatches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """The schedule of this rank's ``stages``; gradients are summed over the micro-batches.

    Args:
        num_microbatches: a legal number.
        loss: of the last stage's output and the target.
    """
    # Torch divides gradients by the number of micro-batches unless told not to.
    settings: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    match name:
        case "gpipe":
            return ScheduleGPipe(stages[0], num_microbatches, **settings)
        case "1f1b":
            return Schedule1F1B(stages[0], num_microbatches, **settings)
        case "interleaved_1f1b":
            return ScheduleInterleaved1F1B(stages, num_microbatches, **settings)
        case "interleaved_zero_bubble":
            return ScheduleInterleavedZeroBubble(stages, num_microbatches, **settings)
        case "zbv":
            return ScheduleZBVZeroBubble(stages, num_microbatches, **settings)
        case "dualpipev":
            return ScheduleDualPipeV(stages, num_microbatches, **settings)


def leave_out_backward(schedule: PipelineScheduleMulti) -> None:
    """Make an evaluation of it.

    Torch skips the backward passes of an evaluation one by one but still hands gradients over between stages of one
    rank, which there are none of, and fails (2.13, ZB-V and DualPipeV).
    """
    _rewrite(
        schedule, lambda action: [part for part in _parts(action) if part.computation_type in _OF_FORWARD]
    )


def join_backward(schedule: PipelineScheduleMulti) -> None:
    """Make B of I, and nothing of W.

    For stages whose backward can't be halved: I would compute all of it, and W all of it again.
    """

    def joined(action: Any) -> list[Any]:
        if action.computation_type in (BACKWARD_WEIGHT, REDUCE_GRAD):
            return []
        if action.computation_type == BACKWARD_INPUT:
            return [action._replace(computation_type=FULL_BACKWARD)]
        return [action]

    _rewrite(schedule, joined, reduce=True)


def _parts(action: Any) -> Sequence[Any]:
    """A forward and a backward pass that belong together (OVERLAP_F_B) are one action of two."""
    return action.sub_actions or (action,)


def _rewrite(schedule: Any, changed: Callable[[Any], list[Any]], *, reduce: bool = False) -> None:
    table = schedule.pipeline_order_with_comms
    for rank, actions in table.items():
        row = [new for action in actions for new in changed(action)]
        if reduce:
            row = _with_reductions(row)
        table[rank] = _without_idle_gathering(row)


def _with_reductions(actions: list[Any]) -> list[Any]:
    """With REDUCE_GRAD right behind the last backward pass of each stage, while its parameters are gathered."""
    last = {
        part.stage_index: index
        for index, action in enumerate(actions)
        for part in _parts(action)
        if part.computation_type == FULL_BACKWARD
    }
    result = []
    for index, action in enumerate(actions):
        result.append(action)
        for stage in [stage for stage, position in last.items() if position == index]:
            result.append(
                action._replace(
                    stage_index=stage, computation_type=REDUCE_GRAD, microbatch_index=None, sub_actions=None
                )
            )
    return result


def _without_idle_gathering(actions: list[Any]) -> list[Any]:
    """Without parameters that are gathered and dropped again with no pass between, which torch takes for an error."""
    unused: dict[int, int] = {}
    dropped = set()
    for index, action in enumerate(actions):
        if action.computation_type == UNSHARD:
            unused[action.stage_index] = index
        elif action.computation_type == RESHARD and action.stage_index in unused:
            dropped |= {index, unused.pop(action.stage_index)}
        for part in _parts(action):
            if part.computation_type in _PASSES:
                unused.pop(part.stage_index, None)
    return [action for index, action in enumerate(actions) if index not in dropped]
