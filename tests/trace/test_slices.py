"""The split as instants: no gap, no overlap, and the same sums as the account, window by window and class by class."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from event_tables import Row, kernel, trace_of_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.measure.account import Account, Window
from drivetrain.trace.account import account_of
from drivetrain.trace.health import Finding
from drivetrain.trace.read import read_trace
from drivetrain.trace.slices import RankSplit, class_slices, last_ranks
from drivetrain.trace.table import Category, Trace
from drivetrain.trace.timeline import StepWindow

DATA = Path(__file__).parent / "data"
GEMM = "ampere_sgemm_128x64_nn"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def split(traces: Sequence[Trace], step_window: StepWindow = "device") -> tuple[Account, list[RankSplit]]:
    splits: list[RankSplit] = []
    return account_of(traces, step_window=step_window, on_split=splits.append), splits


def check_sums(account: Account, splits: Sequence[RankSplit]) -> None:
    """The slices of each window are its account, and leave no gap."""
    assert [one.rank for one in splits] == [rank.rank for rank in account.ranks]
    for rank, one in zip(account.ranks, splits, strict=True):
        windows = [rank.whole, *(step.window for step in rank.steps)]
        for bounds, window in zip(one.windows.tolist(), windows, strict=True):
            check_window(one, bounds, window)


def check_window(one: RankSplit, bounds: tuple[int, int], window: Window) -> None:
    slices = class_slices(one)
    inside = (slices.start_ns >= bounds[0]) & (slices.end_ns <= bounds[1])
    starts, ends = slices.start_ns[inside], slices.end_ns[inside]
    if bounds[0] < bounds[1]:  # two steps may begin at once
        assert starts[0] == bounds[0]
        assert ends[-1] == bounds[1]
    assert np.array_equal(ends[:-1], starts[1:]), "a gap or an overlap"
    sums: dict[str, int] = {}
    for index, length in zip(slices.name[inside].tolist(), (ends - starts).tolist(), strict=True):
        sums[slices.names[index]] = sums.get(slices.names[index], 0) + length
    unexplained = sums.pop("unexplained", 0)
    assert (sums, unexplained) == (dict(window.classes), window.unexplained_ns)


@pytest.mark.parametrize("step_window", ["device", "cpu"])
@pytest.mark.parametrize(
    "name",
    [
        "cpp_2_1.json",
        "cpp_2_13.json",
        "graph_replay.json",
        "missing_steps.json",
        "no_device_events.json",
        "truncated.json",
    ],
)
def test_slices_of_a_file_add_up_to_its_account(name: str, step_window: StepWindow) -> None:
    check_sums(*split([read_trace(DATA / name, cache=False)], step_window))


ROWS = st.lists(
    st.one_of(
        st.builds(
            lambda name, start, duration, stream: kernel(name, start, duration, stream=stream),
            st.sampled_from([GEMM, ALL_REDUCE, "no rule knows this one"]),
            st.integers(0, 80),
            st.integers(1, 30),
            st.integers(0, 2),
        ),
        st.builds(
            Row,
            st.sampled_from([Category.CPU_OP, Category.RUNTIME, Category.ANNOTATION]),
            st.sampled_from(
                ["aten::mm", "drivetrain/fetch", "cudaStreamSynchronize", "ProfilerStep#3", "ProfilerStep#4"]
            ),
            st.integers(0, 80),
            st.integers(1, 40),
        ),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(ROWS, st.sampled_from(["device", "cpu"]))
def test_slices_of_any_trace_add_up_to_its_account(rows: list[Row], step_window: StepWindow) -> None:
    check_sums(*split([trace_of_rows(rows)], step_window))


def test_a_withheld_figure_is_shown_as_unexplained_and_never_as_a_class() -> None:
    trace = trace_of_rows(
        [kernel(GEMM, 0, 40), kernel(ALL_REDUCE, 30, 50, stream=20), kernel(GEMM, 90, 10)],
        health=(Finding("x", "warning", "not to be trusted", 1, ("compute_ns",)),),
    )
    account, splits = split([trace])
    check_sums(account, splits)
    assert "compute.matmul" not in class_slices(splits[0]).names
    assert account.ranks[0].whole.unexplained_ns >= 50


def test_the_last_rank_of_each_collective_is_named_on_every_rank() -> None:
    """Clocks a second apart; rank 1 comes last but for the third time; ties go to the lowest rank."""
    arrivals = {0: [10_000, 10_000, 60_000, 40_000], 1: [50_000, 70_000, 20_000, 40_000]}
    traces = []
    for rank, mine in arrivals.items():
        clock = rank * 1_000_000_000
        rows = [
            row
            for i, arrival in enumerate(mine)
            for row in (
                kernel(GEMM, clock + i * 100_000 + 1, 5_000),
                kernel(
                    ALL_REDUCE,
                    clock + i * 100_000 + arrival,
                    90_000 - arrival,
                    stream=20,
                    group="0|default_pg",
                    bytes=1024,
                ),
            )
        ]
        group = {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}
        job = {"distributedInfo": {"backend": "nccl", "world_size": 2, "pg_config": [group]}}
        traces.append(trace_of_rows(rows, rank=rank, world_size=2, metadata=job))
    account, splits = split(traces)
    check_sums(account, splits)
    assert [one.offset_ns for one in splits] == [0, -1_000_000_000]
    expected = [1, 1, 0, 0]
    assert [one.last_rank for one in account.collectives] == expected
    assert {rank: last.tolist() for rank, last in last_ranks(splits).items()} == {0: expected, 1: expected}


def test_one_rank_alone_knows_no_last_rank() -> None:
    _, splits = split([trace_of_rows([kernel(GEMM, 0, 5), kernel(ALL_REDUCE, 5, 10, stream=20)])])
    assert last_ranks(splits)[0].tolist() == [-1]
