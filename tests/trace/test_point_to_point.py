"""Sends and receives: their peers, their matches, and the clocks that messages align."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from event_tables import Row, trace_of_rows
from test_pipeline_bubbles import BACKWARD, GEMM, PIPELINE, SEND_RECV, Stage, job, pipeline

from drivetrain.trace.account import account_of
from drivetrain.trace.table import Category, Trace


def host_stage(
    rank: int, sends: Sequence[tuple[int, int, bool]], receives: Sequence[tuple[int, int]]
) -> Trace:
    """Ranges of a CPU backend: sends (peer, start, after backward work) and receives (peer, start)."""
    rows = [Row(Category.ANNOTATION, "ProfilerStep#1", 0, 100_000)]
    arguments: dict[int, dict[str, Any]] = {}
    for peer, start, backward in sends:
        if backward:
            rows.append(Row(Category.CPU_OP, BACKWARD, start - 200, 150))
        rows.append(Row(Category.CPU_OP, "aten::mm", start - 200, 100))
        rows.append(Row(Category.CPU_OP, "c10d::send", start, 10))
        arguments[len(rows) - 1] = {"Concrete Inputs": ["", "", str(peer), "0"]}
        rows.append(Row(Category.ANNOTATION, "gloo:send", start + 5, 50, bytes=64))
    for peer, start in receives:
        rows.append(Row(Category.CPU_OP, "c10d::recv_", start, 10))
        arguments[len(rows) - 1] = {"Concrete Inputs": ["", "", str(peer), "0"]}
        rows.append(Row(Category.ANNOTATION, "gloo:recv", start + 5, 300, bytes=64))
    group = {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1, 2]}
    info = {"distributedInfo": {"backend": "gloo", "world_size": 3, "pg_config": [group]}}
    made = trace_of_rows(rows, rank=rank, world_size=3, metadata=info)
    return replace(made, argument_reader=lambda indices: [arguments.get(int(i), {}) for i in indices])


def test_an_unnamed_group_is_a_pipeline_where_activations_go_up_and_gradients_down() -> None:
    account = account_of([host_stage(1, [(2, 1000, False), (0, 3000, True)], [(0, 100), (2, 2000)])])
    assert "communication.pp.unsplit" in account.ranks[0].whole.classes


def test_a_ring_is_no_pipeline() -> None:
    """Context parallelism sends keys and values to the next rank in both passes."""
    account = account_of([host_stage(1, [(2, 1000, False), (2, 3000, True)], [(0, 100), (0, 2000)])])
    assert "communication.pp.unsplit" not in account.ranks[0].whole.classes


def test_messages_align_clocks_where_there_is_no_collective() -> None:
    """Rank 1's clock is 5 us off; cause and effect leave an offset open of at most what a message takes."""
    first = host_stage(0, [(1, t, False) for t in (1000, 5000, 9000)], [(1, t) for t in (3000, 7000, 11_000)])
    second = host_stage(
        1, [(0, t + 100, True) for t in (3000, 7000, 11_000)], [(0, t - 100) for t in (1000, 5000, 9000)]
    )
    second = replace(second, events=replace(second.events, start_ns=second.events.start_ns + 5000))
    account = account_of([first, second])
    assert account.clock_residual_ns is not None
    assert account.clock_residual_ns <= 250
    assert abs(account.clock_offsets_ns[1] + 5000) <= account.clock_residual_ns
    assert "communication.world.transfer" in account.ranks[1].whole.classes
    assert "communication.world.unsplit" not in account.ranks[1].whole.classes


def test_threads_of_the_host_that_receive_later_one_way_are_no_slow_link() -> None:
    """Rank 1 computes, and its threads take a message in ten times as late as those of rank 0."""
    up, down = range(1000, 50_000, 5000), range(3000, 53_000, 5000)
    first = host_stage(0, [(1, t, False) for t in up], [(1, t) for t in down])
    second = host_stage(1, [(0, t, True) for t in down], [(0, t) for t in up])
    events = second.events
    late = np.array([events.names[name] == "gloo:recv" for name in events.name.tolist()])
    second = replace(second, events=replace(events, duration_ns=np.where(late, 2000, events.duration_ns)))
    messages = [one for one in account_of([first, second]).verdicts if one.kind == "send"]
    assert [one.occurrences for one in messages] == [10, 10]
    assert max(one.transfer_ns_per_step for one in messages) > 3 * min(
        one.transfer_ns_per_step for one in messages
    )
    assert [one.losses for one in messages] == [(), ()]
    told = "a message between threads of the host arrives when those are scheduled, whatever the link"
    assert [one.reason for one in messages] == [told, told], "not that there is no other to compare with"


def test_messages_received_before_they_are_sent_align_nothing() -> None:
    first = host_stage(
        0, [(1, t, False) for t in (3000, 7000, 11_000)], [(1, t) for t in (5000, 9000, 13_000)]
    )
    second = host_stage(
        1, [(0, t + 1100, True) for t in (5000, 9000, 13_000)], [(0, t - 1100) for t in (3000, 7000, 11_000)]
    )
    account = account_of([first, second])
    refused = next(finding for finding in account.health if finding.id == "clocks_unaligned")
    assert "before it is sent" in refused.message
    assert account.ranks[0].whole.group_ns("bubble") == 0


def test_sends_without_as_many_receives_are_not_matched() -> None:
    traces = pipeline(2, 3, [1000] * 2, [2000] * 2)
    events = traces[1].events
    receives = np.flatnonzero(events.is_device_work() & (events.stream == 2))
    kept = np.ones(len(events), np.bool_)
    kept[receives[-1]] = False
    account = account_of([traces[0], replace(traces[1], events=events.select(kept))])
    assert any(finding.id == "unmatched_collectives" for finding in account.health)
    assert account.ranks[1].steps[0].window.group_ns("bubble") > 0, "the other step is matched"


def batched(rank: int, world_size: int, rows: Sequence[tuple[str, int, int]]) -> Trace:
    """A stage whose messages are batches of sends and receives: kernels that name no peer."""
    stage = Stage(rank, world_size)
    stage.begin_step(1, 0, 10_000)
    for what, start, end in rows:
        if what == "batch":
            stage.add(SEND_RECV, start, end, within="nccl:coalesced", stream=20, group=PIPELINE)
        else:
            stage.add(GEMM, start, end, within=BACKWARD if what == "backward" else "")
    made = stage.trace()
    return replace(made, metadata=job(world_size))


FIRST = [("forward", 0, 1000), ("batch", 1000, 1010), ("batch", 1010, 4020), ("backward", 4020, 6020)]
LAST = [("batch", 0, 1010), ("forward", 1010, 2010), ("backward", 2010, 4010), ("batch", 4010, 4020)]


def test_batches_of_two_stages_are_matched_in_their_order() -> None:
    account = account_of([batched(0, 2, FIRST), batched(1, 2, LAST)])
    first, last = (rank.whole.classes for rank in account.ranks)
    assert first["bubble.warmup"] == 3000
    assert last["bubble.warmup"] == 1000
    assert first["communication.pp.transfer"] == last["communication.pp.transfer"] == 20
    assert len(account.collectives) == 2, "both sides of a batch end together, as those of a collective do"


def test_batches_in_a_longer_pipeline_are_not_matched() -> None:
    """Their peer is one of two neighbours, and the record does not say which."""
    account = account_of([batched(0, 4, FIRST), batched(1, 4, LAST)])
    for rank in account.ranks:
        assert rank.whole.group_ns("bubble") == 0
        assert rank.whole.classes["communication.pp.unsplit"] > 0
    assert account.collectives == ()
