"""Across ranks: one clock, waiting and transfer, who is last, who is absent, what is refused."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from event_tables import Row, kernel, trace_of_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.errors import DataError
from drivetrain.measure.account import Account
from drivetrain.trace.account import account_of
from drivetrain.trace.collectives import bus_bandwidth
from drivetrain.trace.table import Category, Trace

GEMM = "ampere_sgemm_128x64_nn"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MS = 1_000_000
STEP = 100 * MS


def job(world_size: int) -> dict[str, Any]:
    group = {"pg_name": "0", "pg_desc": "default_pg", "ranks": list(range(world_size))}
    return {"distributedInfo": {"backend": "nccl", "world_size": world_size, "pg_config": [group]}}


def rank_trace(
    rank: int,
    arrivals: Sequence[int],
    *,
    done: Sequence[int],
    world_size: int = 2,
    clock: int = 0,
    metadata: Mapping[str, Any] | None = None,
    payload: int = 1_000_000,
) -> Trace:
    """One all-reduce a step: started at its arrival, over when it is done; compute until arrival. Times from the
    start of the step, in ns; `clock` is what the rank's clock is ahead."""
    rows: list[Row] = []
    for i, (arrival, end) in enumerate(zip(arrivals, done, strict=True)):
        start = clock + i * STEP
        rows.append(Row(Category.ANNOTATION, f"ProfilerStep#{i + 1}", start, STEP))
        rows.append(Row(Category.RUNTIME, "cudaLaunchKernel", start + 1, 1, correlation=2 * i + 1))
        rows.append(kernel(GEMM, start + 2, arrival - 2, correlation=2 * i + 1))
        rows.append(Row(Category.RUNTIME, "cudaLaunchKernel", start + 2, 1, correlation=2 * i + 2))
        rows.append(
            kernel(
                ALL_REDUCE,
                start + arrival,
                end - arrival,
                stream=20,
                correlation=2 * i + 2,
                group="0|default_pg",
                bytes=payload,
            )
        )
    return trace_of_rows(rows, rank=rank, world_size=world_size, metadata=metadata or job(world_size))


def pair(clock: int = 0, **more: Any) -> Account:
    """Rank 1 comes 30 ms later than rank 0 in three of four steps; the transfer takes 5 ms."""
    early, late = [20 * MS, 20 * MS, 20 * MS, 50 * MS], [50 * MS, 50 * MS, 50 * MS, 20 * MS]
    done = [55 * MS] * 4
    return account_of(
        [rank_trace(0, early, done=done, **more), rank_trace(1, late, done=done, clock=clock, **more)]
    )


def ids(account: Account) -> set[str]:
    return {finding.id for finding in account.health}


def test_waiting_ends_when_the_last_rank_arrives() -> None:
    account = pair()
    assert [one.last_rank for one in account.collectives] == [1, 1, 1, 0]
    first = account.collectives[0]
    assert (first.start_skew_ns, first.end_skew_ns, first.transfer_ns) == (30 * MS, 0, 5 * MS)
    assert dict(first.wait_ns) == {0: 30 * MS, 1: 0}
    assert (first.kind, first.group, first.bytes, first.step) == ("all_reduce", "world", 1_000_000, 1)
    assert [one.index for one in account.collectives] == [0, 1, 2, 3]


def test_the_classes_of_each_rank_are_split_into_wait_and_transfer() -> None:
    waiting, late = (rank.whole for rank in pair().ranks)
    assert waiting.classes["communication.world.wait"] == 90 * MS
    assert waiting.classes["communication.world.transfer"] == 20 * MS
    assert late.classes["communication.world.wait"] == 30 * MS
    assert sum(waiting.classes.values()) + waiting.unexplained_ns == waiting.window_ns


def test_one_rank_alone_cannot_be_split() -> None:
    account = account_of([rank_trace(0, [20 * MS], done=[55 * MS])])
    assert account.ranks[0].whole.classes["communication.world.unsplit"] == 35 * MS
    assert account.collectives == ()
    assert account.clock_residual_ns is None


def test_the_rank_that_is_waited_for_is_named_with_its_cost_a_step() -> None:
    stragglers = pair().stragglers
    assert [(one.rank, one.times_last, one.collectives) for one in stragglers] == [(1, 3, 4), (0, 1, 4)]
    assert stragglers[0].cost_ns_per_step == 90 * MS / 4
    assert stragglers[1].cost_ns_per_step == 30 * MS / 4


def test_waiting_under_compute_costs_nothing() -> None:
    early = rank_trace(0, [20 * MS], done=[55 * MS])
    busy = kernel(GEMM, 0, 60 * MS, stream=9, correlation=1)
    covered = replace(early, events=trace_of_rows([*rows_of(early), busy]).events)
    account = account_of([covered, rank_trace(1, [50 * MS], done=[55 * MS])])
    assert account.stragglers[0].cost_ns_per_step == 0
    assert account.ranks[0].whole.overlapped_communication_ns == 35 * MS


def rows_of(trace: Trace) -> list[Row]:
    events = trace.events
    return [
        Row(
            Category(int(events.category[i])),
            events.names[events.name[i]],
            int(events.start_ns[i]),
            int(events.duration_ns[i]),
            thread=events.threads[events.thread[i]],
            stream=int(events.streams[events.stream[i]]) if events.stream[i] >= 0 else -1,
            correlation=int(events.correlation[i]),
            group=events.groups[events.group[i]] if events.group[i] >= 0 else "",
            bytes=int(events.bytes[i]),
            device=int(events.device[i]),
        )
        for i in range(len(events))
    ]


@settings(max_examples=30, deadline=None)
@given(st.integers(-(10**11), 10**11))
def test_a_shifted_clock_changes_nothing(clock: int) -> None:
    true, shifted = pair(), pair(clock)
    # Below 20 us an offset cannot be told from ends that differ.
    error = abs(clock) if abs(clock) <= 20_000 else 0
    assert shifted.clock_offsets_ns[1] == (-clock if not error else 0)
    for ours, theirs in zip(shifted.collectives, true.collectives, strict=True):
        assert ours.last_rank == theirs.last_rank
        assert abs(ours.transfer_ns - theirs.transfer_ns) <= error
    if not error:
        assert [rank.whole for rank in shifted.ranks] == [rank.whole for rank in true.ranks]
        assert shifted.clock_residual_ns == 0
        assert ("clocks_shifted" in ids(shifted)) == (clock != 0)


def test_clocks_that_no_offset_explains_are_not_compared() -> None:
    """A clock that drifts by seconds a step."""
    drifting = rank_trace(1, [50 * MS] * 4, done=[55 * MS] * 4)
    shift = (drifting.events.start_ns // STEP) * 10**9
    events = replace(drifting.events, start_ns=drifting.events.start_ns + shift)
    account = account_of([rank_trace(0, [20 * MS] * 4, done=[55 * MS] * 4), replace(drifting, events=events)])
    assert account.collectives == ()
    assert account.clock_residual_ns is None
    assert account.stragglers == ()
    refused = next(finding for finding in account.health if finding.id == "clocks_unaligned")
    assert refused.severity == "error"
    assert "rank 1" in refused.message
    assert "communication.world.unsplit" in account.ranks[0].whole.classes, "each rank's own account stands"


def test_too_few_collectives_tell_no_offset() -> None:
    traces = [
        rank_trace(rank, [20 * MS] * 2, done=[55 * MS] * 2, clock=rank * 10 * STEP) for rank in range(2)
    ]
    assert "clocks_unaligned" in ids(account_of(traces))


def two_runs(*, other_kind: bool) -> list[Trace]:
    """Rank 0 of one run and rank 1 of the next, ten seconds later: as many steps and collectives, other times."""
    early, late = [20 * MS] * 4, [50 * MS] * 4
    mine = rank_trace(0, early, done=[75 * MS, 61 * MS, 90 * MS, 58 * MS])
    theirs = rank_trace(1, late, done=[55 * MS, 95 * MS, 56 * MS, 88 * MS], clock=10_000 * MS)
    if other_kind:
        names = tuple(ALL_GATHER if name == ALL_REDUCE else name for name in theirs.events.names)
        theirs = replace(theirs, events=replace(theirs.events, names=names))
    return [mine, theirs]


@pytest.mark.parametrize("other_kind", [False, True])
def test_ranks_of_two_runs_in_turn_are_not_taken_for_clocks_that_differ(other_kind: bool) -> None:
    with pytest.raises(DataError, match=r"not of one job, or not of one window.*apart"):
        account_of(two_runs(other_kind=other_kind))


def test_a_late_start_of_the_profiler_does_not_shift_the_match() -> None:
    """Rank 1 did not record step 1: step numbers, not positions, say which collective is which."""
    full = rank_trace(0, [20 * MS] * 4, done=[55 * MS] * 4)
    late = rank_trace(1, [50 * MS] * 4, done=[55 * MS] * 4)
    cut = replace(late, events=late.events.select(late.events.start_ns >= STEP))
    account = account_of([full, cut])
    assert [one.step for one in account.collectives] == [2, 3, 4]
    assert all(one.last_rank == 1 and one.end_skew_ns == 0 for one in account.collectives)
    assert "unmatched_collectives" in ids(account)


def test_collectives_of_groups_are_matched_among_their_members() -> None:
    """Ranks 0 and 1, 2 and 3 are pairs; the first pair waits for 1, the second for 2."""
    arrivals = {0: 20, 1: 50, 2: 40, 3: 30}
    traces = []
    for rank, arrival in arrivals.items():
        members = [0, 1] if rank < 2 else [2, 3]
        group = {"pg_name": str(members[0]), "pg_desc": "DATA_PARALLEL_GROUP", "ranks": members}
        info = {"distributedInfo": {"world_size": 4, "pg_config": [group]}}
        trace = rank_trace(rank, [arrival * MS] * 3, done=[55 * MS] * 3, world_size=4, metadata=info)
        named = [replace(row, group=f"{members[0]}|") if row.group else row for row in rows_of(trace)]
        traces.append(replace(trace, events=trace_of_rows(named).events))
    account = account_of(traces)
    # No collective joins the pairs, so their clocks stay unrelated, and nothing is compared.
    assert "clocks_unaligned" in ids(account)
    pairs = account_of(traces[:2])
    assert {(one.last_rank, one.group) for one in pairs.collectives} == {(1, "dp")}
    assert len(pairs.collectives) == 3


def test_absent_ranks_are_named() -> None:
    traces = [rank_trace(rank, [20 * MS], done=[55 * MS], world_size=4) for rank in (0, 2)]
    account = account_of(traces)
    assert account.absent_ranks == (1, 3)
    assert any(finding.id == "absent_ranks" and "1, 3" in finding.message for finding in account.health)
    assert len(account.collectives) == 1, "those that are there are compared all the same"


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert bus_bandwidth("all_reduce", 1000, 4, 1000) == 2 * 1000 * 3 / 4 * 1e9 / 1000
    assert bus_bandwidth("reduce_scatter", 1000, 4, 1000) == 1000 * 3 / 4 * 1e9 / 1000
    assert bus_bandwidth("all_gather", 1000, 4, 1000) == 1000 * 3 * 1e9 / 1000
    assert bus_bandwidth("broadcast", 1000, 4, 1000) == 1e9
    assert bus_bandwidth("barrier", 1000, 4, 1000) is None
    assert bus_bandwidth("all_reduce", None, 4, 1000) is None
    assert bus_bandwidth("all_reduce", 1000, 4, 0) is None
    account = pair()
    assert account.collectives[0].bus_bandwidth == pytest.approx(1_000_000 / 0.005)
    assert account.bus_bandwidths[("world", "all_reduce")] == pytest.approx(1_000_000 / 0.005)


def test_ranks_without_communication_are_not_compared_but_said() -> None:
    account = account_of([trace_of_rows([kernel(GEMM, 0, 10)], rank=rank, world_size=2) for rank in range(2)])
    assert "no_communication" in ids(account)
    assert len(account.ranks) == 2


def test_traces_without_a_rank_are_numbered_in_their_order() -> None:
    account = account_of([replace(trace, rank=None) for trace in (rank_trace(0, [1], done=[2]),) * 2])
    assert [rank.rank for rank in account.ranks] == [0, 1]
    assert "rank_unknown" in ids(account)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"world_size": 4}, "world sizes 2 and 4"),
        ({"metadata": {"distributedInfo": {"backend": "gloo"}}}, "backends nccl and gloo"),
        ({"clock": 5 * 3_600 * 10**9}, "hours apart"),
    ],
)
def test_ranks_of_different_jobs_are_refused(changed: dict[str, Any], said: str) -> None:
    mine = rank_trace(0, [20 * MS] * 3, done=[55 * MS] * 3)
    other = rank_trace(1, [20 * MS] * 3, done=[55 * MS] * 3, **changed)
    with pytest.raises(DataError, match=said):
        account_of([mine, other])


def test_traces_of_different_steps_are_refused() -> None:
    mine = rank_trace(0, [20 * MS] * 4, done=[55 * MS] * 4)
    other = rank_trace(1, [20 * MS] * 4, done=[55 * MS] * 4)
    early = replace(mine, events=mine.events.select(mine.events.start_ns < 2 * STEP))
    late = replace(other, events=other.events.select(other.events.start_ns >= 2 * STEP))
    with pytest.raises(DataError, match="steps 1 to 2 and 3 to 4"):
        account_of([early, late])


def test_two_traces_of_one_rank_are_refused() -> None:
    with pytest.raises(DataError, match="both of rank 0"):
        account_of([rank_trace(0, [1], done=[2])] * 2)


def test_a_rank_beyond_the_job_is_refused() -> None:
    with pytest.raises(DataError, match="rank 7, but the job has 2 ranks"):
        account_of([rank_trace(0, [1], done=[2]), rank_trace(7, [1], done=[2])])


def test_kinds_with_a_root_do_not_set_clocks() -> None:
    """The root of a broadcast is done before the others have begun."""
    broadcast = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    traces = []
    for rank, (start, duration) in enumerate([(0, 10), (50_000, 10)]):
        rows = [
            kernel(broadcast, 1_000_000 * i + start, duration, group="0|default_pg", bytes=8)
            for i in range(4)
        ]
        rows += [
            kernel(ALL_GATHER, 1_000_000 * i + 500_000, 100, group="0|default_pg", bytes=8) for i in range(4)
        ]
        traces.append(trace_of_rows(rows, rank=rank, world_size=2, metadata=job(2)))
    account = account_of(traces)
    assert account.clock_offsets_ns == {0: 0, 1: 0}
    assert all(one.transfer_ns == 0 for one in account.collectives if one.kind == "broadcast")
    assert np.all([one.transfer_ns == 100 for one in account.collectives if one.kind == "all_gather"])
