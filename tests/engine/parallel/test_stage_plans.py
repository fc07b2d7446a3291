"""Stages as arithmetic: every layer once, ranks as torch deals them out, and no number torch would refuse."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from drivetrain.config.stages import (
    V_SHAPED,
    Schedule,
    check_micro_batches,
    layers_of_text,
    legal_micro_batches,
    plan_stages,
    stages_per_rank,
)
from drivetrain.errors import ConfigurationError

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
TORCH: dict[Schedule, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def torch_builds(schedule: Schedule, pp: int, num_microbatches: int) -> bool:
    """Whether torch makes a complete order of passes and messages; no processes are needed for that."""
    each = stages_per_rank(schedule, None)
    stages = [
        SimpleNamespace(num_stages=each * pp, group_size=pp, group_rank=0, stage_index=stage, submod=None)
        for stage in range(each)
    ]
    try:
        TORCH[schedule](stages if each > 1 else stages[0], num_microbatches, loss_fn=lambda out, _: out)
    except ValueError:
        return False
    return True


@given(
    schedule=st.sampled_from(SCHEDULES),
    pp=st.integers(1, 8),
    virtual=st.integers(2, 4),
    extra=st.integers(0, 40),
)
def test_every_layer_lies_on_one_rank_and_stages_differ_by_one_layer_at_most(
    schedule: Schedule, pp: int, virtual: int, extra: int
) -> None:
    asked = virtual if schedule.startswith("interleaved") else None
    stages = pp * stages_per_rank(schedule, asked)
    plan = plan_stages(stages + extra, pp, schedule, asked)
    names = [name for stage in range(stages) for name in plan.layers(stage)]
    assert names == [str(layer) for layer in range(stages + extra)]
    assert sorted(name for rank in range(pp) for name in plan.layers_on(rank)) == sorted(names)
    assert max(plan.layers_per_stage) - min(plan.layers_per_stage) <= 1
    assert plan.layers_per_stage[-1] == min(plan.layers_per_stage)
    style = "v" if schedule in V_SHAPED else "loop"
    expected = generate_stage_to_rank_mapping(pp, stages, style)
    assert {stage: plan.rank_of(stage) for stage in range(stages)} == expected


@given(
    schedule=st.sampled_from(SCHEDULES), pp=st.integers(1, 6), each=st.integers(1, 3), count=st.integers(1, 9)
)
def test_what_ranks_send_is_one_message_for_each_border_between_them(
    schedule: Schedule, pp: int, each: int, count: int
) -> None:
    stages = pp * stages_per_rank(schedule, None)
    plan = plan_stages(stages * each, pp, schedule)
    borders = sum(plan.rank_of(stage) != plan.rank_of(stage + 1) for stage in range(stages - 1))
    assert sum(plan.messages_sent(rank, count) for rank in range(pp)) == 2 * count * borders
    assert sum(plan.messages_sent(rank, count, backward=False) for rank in range(pp)) == count * borders


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_legal_number_of_micro_batches_is_one_that_torch_schedules(schedule: Schedule, pp: int) -> None:
    for num_microbatches in range(1, 6 * pp):
        legal = legal_micro_batches(schedule, pp, num_microbatches)
        built = torch_builds(schedule, pp, num_microbatches)
        if num_microbatches >= pp:
            assert legal == built, num_microbatches
        else:
            assert built or not legal, num_microbatches


def test_a_number_of_micro_batches_that_a_schedule_cannot_run_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"5 micro-batches .* nearest legal number is 4 or 6"):
        check_micro_batches("interleaved_1f1b", 2, 5)
    with pytest.raises(ConfigurationError, match=r"3 micro-batches .* nearest legal number is 4$"):
        check_micro_batches("1f1b", 4, 3)
    with pytest.raises(ConfigurationError, match=r"7 micro-batches .* nearest legal number is 8$"):
        check_micro_batches("dualpipev", 4, 7)
    check_micro_batches("gpipe", 4, 1)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((3, 4, "1f1b"), "nearest legal number of layers is 4"),
        ((7, 2, "1f1b", None, (3, 2, 2)), "3 stages, but 1f1b on 2 ranks has 2"),
        ((7, 2, "1f1b", None, (3, 3)), "6 layers, but model.num_layers = 7"),
        ((4, 2, "zbv", None, (2, 0, 1, 1)), "only the first and the last stage may be without a layer"),
        ((8, 2, "1f1b", 2), "1f1b has 1 on each rank"),
        ((8, 2, "interleaved_1f1b", 1), "nearest legal value is 2"),
        ((8, 2, "zbv", 3), "zbv has 2 on each rank"),
        ((8, 2, "dualpipev", 1), "dualpipev has 2 on each rank"),
    ],
)
def test_a_cut_that_does_not_come_out_is_refused(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        plan_stages(*arguments)


def test_embedding_and_loss_may_be_alone() -> None:
    plan = plan_stages(4, 4, "1f1b", None, layers_of_text("0,2,2,0"))
    assert [plan.layers_on(rank) for rank in range(4)] == [(), ("0", "1"), ("2", "3"), ()]


@pytest.mark.parametrize("text", ["", "3,,1", "2;2", "-1,3", "a"])
def test_a_layout_that_is_no_list_of_counts_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected the number of layers of each stage"):
        layers_of_text(text)
