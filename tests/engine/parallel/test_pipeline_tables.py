"""The tables by which torch runs a pipeline, as they are and as they are changed: each pass once, nothing forgotten."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from drivetrain.config.stages import ZERO_BUBBLE, Schedule, StagePlan, legal_micro_batches, plan_stages
from drivetrain.engine.parallel.pipeline_schedules import build_schedule, join_backward, leave_out_backward

TABLES: tuple[Schedule, ...] = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
Row = list[Any]


def table(schedule: Schedule, pp: int, num_microbatches: int, virtual: int | None = None) -> Any:
    """Torch's schedule with the rows of all ranks; no processes are needed for that."""
    plan = plan_of(schedule, pp, virtual)
    stages = [
        SimpleNamespace(
            num_stages=plan.num_stages, group_size=pp, group_rank=0, stage_index=stage, submod=None
        )
        for stage in range(plan.num_stages // pp)
    ]
    built = build_schedule(schedule, stages, num_microbatches, lambda out, _: out)
    assert isinstance(built, PipelineScheduleMulti)
    return built


def plan_of(schedule: Schedule, pp: int, virtual: int | None = None) -> StagePlan:
    return plan_stages(8 * pp, pp, schedule, virtual)


def sizes() -> Iterator[tuple[Schedule, int, int, int | None]]:
    for schedule in TABLES:
        for pp in (2, 3, 4, 8):
            for virtual in (2, 4) if schedule.startswith("interleaved") else (None,):
                for number in (pp, pp + 1, 2 * pp, 2 * pp + 1, 3 * pp):
                    if legal_micro_batches(schedule, pp, number):
                        yield schedule, pp, number, virtual


def passes(row: Row) -> list[tuple[str, int, int]]:
    """Kind, stage and micro-batch of each pass of a rank, those that belong together one after the other."""
    parts = [part for action in row for part in action.sub_actions or (action,)]
    return [
        (part.computation_type.value, part.stage_index, part.microbatch_index)
        for part in parts
        if part.computation_type.value in ("F", "B", "I", "W")
    ]


def check_gathering(row: Row, num_microbatches: int) -> None:
    """As torch's runtime has it: nobody computes on dropped parameters, nor drops those that nobody has waited for."""
    asked, there = set(), set()
    backwards: Counter[int] = Counter()
    for action in row:
        kind, stage = action.computation_type.value, action.stage_index
        if kind == "UNSHARD":
            assert stage not in asked | there
            asked.add(stage)
        elif kind == "RESHARD":
            assert stage in there
            there.remove(stage)
        elif kind == "REDUCE_GRAD":
            assert stage in there
            assert backwards[stage] == num_microbatches
        for part_kind, part_stage, _ in passes([action]):
            there |= asked & {part_stage}
            asked -= {part_stage}
            assert part_stage in there
            backwards[part_stage] += part_kind in ("B", "W")
    assert not asked
    assert not there


def messages(row: Row) -> list[str]:
    return [repr(action) for action in row if "SEND" in repr(action) or "RECV" in repr(action)]


def rows(schedule: Any) -> dict[int, Row]:
    found: dict[int, Row] = schedule.pipeline_order_with_comms
    return found


def everything(
    schedule: Schedule, pp: int, number: int, virtual: int | None
) -> Counter[tuple[int, int, int]]:
    plan = plan_of(schedule, pp, virtual)
    return Counter(
        (plan.rank_of(stage), stage, index) for stage in range(plan.num_stages) for index in range(number)
    )


def test_torch_runs_each_pass_once() -> None:
    for size in sizes():
        schedule, pp, number, virtual = size
        forward: Counter[tuple[int, int, int]] = Counter()
        backward: Counter[tuple[int, int, int]] = Counter()
        for rank, row in rows(table(schedule, pp, number, virtual)).items():
            inputs = set()
            for kind, stage, index in passes(row):
                if kind == "F":
                    forward[rank, stage, index] += 1
                elif kind == "I":
                    inputs.add((stage, index))
                else:
                    assert (kind == "W") == ((stage, index) in inputs), size
                    backward[rank, stage, index] += 1
        assert forward == backward == everything(*size), size


def test_an_evaluation_has_forward_passes_alone_and_their_messages() -> None:
    for size in sizes():
        schedule, pp, number, virtual = size
        built = table(schedule, pp, number, virtual)
        before = {rank: messages(row) for rank, row in rows(built).items()}
        leave_out_backward(built)
        forward: Counter[tuple[int, int, int]] = Counter()
        for rank, row in rows(built).items():
            assert {kind for kind, _, _ in passes(row)} == {"F"}
            assert not [
                action for action in row if action.computation_type.value in ("OVERLAP_F_B", "REDUCE_GRAD")
            ]
            forward.update((rank, stage, index) for _, stage, index in passes(row))
            assert messages(row) == [one for one in before[rank] if one.rstrip("0123456789").endswith("F")]
            check_gathering(row, number)
        assert forward == everything(*size), size


def test_a_joined_backward_is_one_pass_where_the_first_half_was() -> None:
    for size in sizes():
        schedule, pp, number, virtual = size
        built = table(schedule, pp, number, virtual)
        before = {rank: (messages(row), passes(row)) for rank, row in rows(built).items()}
        join_backward(built)
        for rank, row in rows(built).items():
            expected = [(kind.replace("I", "B"), *rest) for kind, *rest in before[rank][1] if kind != "W"]
            assert passes(row) == expected, size
            assert messages(row) == before[rank][0], size
            reduced = Counter(
                action.stage_index for action in row if action.computation_type.value == "REDUCE_GRAD"
            )
            assert reduced == Counter(plan_of(schedule, pp, virtual).stages_on(rank)), size
            check_gathering(row, number)


def test_parameters_that_torch_gathers_are_used_before_they_are_dropped() -> None:
    for schedule, pp, number, virtual in sizes():
        for row in rows(table(schedule, pp, number, virtual)).values():
            check_gathering(row, number)


@pytest.mark.parametrize("schedule", sorted(ZERO_BUBBLE))
def test_a_zero_bubble_schedule_halves_some_backward_passes(schedule: Schedule) -> None:
    """Else what is joined would not have been apart."""
    kinds = {kind for row in rows(table(schedule, 4, 8)).values() for kind, _, _ in passes(row)}
    assert kinds >= {"F", "I", "W"}
