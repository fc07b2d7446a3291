"""A slow link against a slow rank: planted, both, neither; nothing claimed of too little or of real traces."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_tables import Row, kernel, trace_of_rows

from drivetrain.measure.account import Account, CommunicationVerdict
from drivetrain.trace.account import account_of
from drivetrain.trace.read import read_trace
from drivetrain.trace.table import Category, Trace

GEMM = "ampere_sgemm_128x64_nn"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
US = 1_000
SHARED_TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


def job(
    *,
    compute: Sequence[int] = (1000, 1000, 1000, 1000),
    host: Sequence[int] = (0, 0, 0, 0),
    transfer: Sequence[Sequence[int]] = ((100,), (100,)),
    steps: int = 6,
    payload: int = 1_000_000,
) -> Account:
    """Four ranks: tensor-parallel pairs 0-1 and 2-3 that reduce every step, and then a gather of all.

    Args:
        compute: us of each rank before the reduction.
        host: us in which a rank does nothing before its reduction.
        transfer: us that each pair's reduction takes, in turn.
        steps: steps, all of which last equally long.
        payload: bytes reduced.
    """
    arrivals = [one + other for one, other in zip(compute, host, strict=True)]
    rows: list[list[Row]] = [[] for _ in range(4)]
    start = 0
    for step in range(steps):
        done = []
        for pair in range(2):
            mine = transfer[pair]
            ready = max(arrivals[2 * pair : 2 * pair + 2])
            done.append(ready + mine[step % len(mine)])
        gathered = max(done) + 20
        for rank in range(4):
            pair = rank // 2
            rows[rank] += [
                Row(Category.ANNOTATION, f"ProfilerStep#{step + 1}", start, gathered * US),
                Row(Category.CPU_OP, "aten::empty", start, 1),
                kernel(GEMM, start + host[rank] * US, compute[rank] * US),
                kernel(
                    ALL_REDUCE,
                    start + arrivals[rank] * US,
                    (done[pair] - arrivals[rank]) * US,
                    stream=20,
                    group=f"{pair + 1}|TENSOR_MODEL_PARALLEL_GROUP",
                    bytes=payload,
                ),
                kernel(
                    ALL_GATHER,
                    start + done[pair] * US,
                    (gathered - done[pair]) * US,
                    stream=21,
                    group="0|default_pg",
                    bytes=1000,
                ),
            ]
        start += gathered * US
    return account_of(traces_of(rows))


def traces_of(rows: Sequence[Sequence[Row]]) -> list[Trace]:
    groups = [
        {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1, 2, 3]},
        {"pg_name": "1", "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [0, 1]},
        {"pg_name": "2", "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [2, 3]},
    ]
    traces = []
    for rank, mine in enumerate(rows):
        own = [group for group in groups if rank in group["ranks"]]
        info: dict[str, Any] = {"distributedInfo": {"backend": "nccl", "world_size": 4, "pg_config": own}}
        traces.append(trace_of_rows(mine, rank=rank, world_size=4, metadata=info))
    return traces


def verdict(account: Account, group: str, ranks: tuple[int, ...]) -> CommunicationVerdict:
    found = [one for one in account.verdicts if (one.group, one.ranks) == (group, ranks)]
    assert len(found) == 1
    return found[0]


def losses(account: Account) -> dict[tuple[str, tuple[int, ...]], tuple[str, ...]]:
    return {(one.group, one.ranks): one.losses for one in account.verdicts if one.losses}


def test_nothing_stands_out_where_all_are_alike() -> None:
    account = job()
    assert losses(account) == {}
    pair = verdict(account, "tp", (0, 1))
    assert (pair.late_rank, pair.late_ns_per_step) == (None, 0)
    assert pair.transfer_ns_per_step == 100 * US
    assert pair.excess_transfer_ns_per_step == 0
    assert pair.bus_bandwidth == pair.reference_bandwidth == pytest.approx(1_000_000 / 100e-6)
    assert pair.reference == "other_groups"
    assert pair.reason is None


def test_a_rank_that_computes_longer_is_slow() -> None:
    account = job(compute=(1000, 1000, 1000, 1300))
    pair = verdict(account, "tp", (2, 3))
    assert pair.losses == ("slow_rank",)
    assert pair.late_rank == 3
    assert pair.late_ns_per_step == 300 * US
    assert pair.compute_excess_ns_per_step == 300 * US
    assert pair.occurrences == 5, "the first recorded step is left out"
    assert verdict(account, "tp", (0, 1)).losses == ()
    assert "slow_link" not in {loss for found in losses(account).values() for loss in found}


def test_a_rank_that_comes_late_without_computing_longer_is_late_only() -> None:
    """Its host, not its device, holds it up."""
    pair = verdict(job(host=(0, 0, 0, 300)), "tp", (2, 3))
    assert pair.losses == ("late_rank",)
    assert pair.late_rank == 3
    assert pair.compute_excess_ns_per_step == 0


def test_a_group_that_moves_the_same_bytes_slower_than_another_has_a_slow_link() -> None:
    account = job(transfer=((100,), (250,)))
    pair = verdict(account, "tp", (2, 3))
    assert pair.losses == ("slow_link",)
    assert pair.reference == "other_groups"
    assert pair.excess_transfer_ns_per_step == 150 * US
    assert pair.bus_bandwidth == pytest.approx(1_000_000 / 250e-6)
    assert pair.reference_bandwidth == pytest.approx(1_000_000 / 100e-6)
    assert verdict(account, "tp", (0, 1)).losses == ()
    assert account.verdicts[0].losses, "what loses time comes first"


def test_a_slow_rank_behind_a_slow_link_is_told_as_both() -> None:
    pair = verdict(job(compute=(1000, 1000, 1000, 1300), transfer=((100,), (250,))), "tp", (2, 3))
    assert pair.losses == ("slow_rank", "slow_link")
    assert pair.late_ns_per_step == 300 * US
    assert pair.excess_transfer_ns_per_step == 150 * US


def test_a_slow_rank_alone_does_not_slow_the_link() -> None:
    """Transfers begin when all have come: lateness is not in them."""
    pair = verdict(job(compute=(1000, 1000, 1000, 1800)), "tp", (2, 3))
    assert pair.losses == ("slow_rank",)
    assert pair.excess_transfer_ns_per_step == 0


def test_a_link_that_is_slow_at_times_is_told_by_its_own_best() -> None:
    """A third of the transfers takes four times as long; no other group of two moves these bytes."""
    rows: list[list[Row]] = [[], []]
    for step in range(13):
        lasts = 400 * US if step % 3 == 0 else 100 * US
        start = step * 2000 * US
        for mine in rows:
            mine += [
                Row(Category.ANNOTATION, f"ProfilerStep#{step + 1}", start, 2000 * US),
                kernel(GEMM, start, 1000 * US),
                kernel(
                    ALL_REDUCE, start + 1000 * US, lasts, stream=20, group="0|default_pg", bytes=1_000_000
                ),
            ]
    group = {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}
    info = {"distributedInfo": {"backend": "nccl", "world_size": 2, "pg_config": [group]}}
    account = account_of(
        trace_of_rows(mine, rank=rank, world_size=2, metadata=info) for rank, mine in enumerate(rows)
    )
    found = account.verdicts[0]
    assert found.losses == ("slow_link",)
    assert found.reference == "own_best"
    assert found.excess_transfer_ns_per_step == pytest.approx(300 * US / 3)


def test_a_loss_below_a_hundredth_of_the_step_is_none() -> None:
    account = job(compute=(1000, 1000, 1000, 1008), transfer=((5,), (12,)))
    assert losses(account) == {}


def test_few_collectives_tell_nothing() -> None:
    account = job(compute=(1000, 1000, 1000, 1300), transfer=((100,), (250,)), steps=4)
    assert losses(account) == {}
    assert all("at least 4" in (one.reason or "") for one in account.verdicts)


def test_ranks_that_are_late_in_turn_do_not_stand_out() -> None:
    """Each is last in half of the collectives."""
    random = np.random.default_rng(3)
    rows: list[list[Row]] = [[], []]
    start = 0
    for step in range(21):
        own = [1000 + int(random.integers(0, 20)) + (300 if step % 2 == rank else 0) for rank in range(2)]
        done = max(own) + 100
        for rank, mine in enumerate(rows):
            mine += [
                Row(Category.ANNOTATION, f"ProfilerStep#{step + 1}", start, done * US),
                kernel(GEMM, start, own[rank] * US),
                kernel(
                    ALL_REDUCE,
                    start + own[rank] * US,
                    (done - own[rank]) * US,
                    stream=20,
                    group="0|default_pg",
                    bytes=1_000_000,
                ),
            ]
        start += done * US
    group = {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}
    info = {"distributedInfo": {"backend": "nccl", "world_size": 2, "pg_config": [group]}}
    account = account_of(
        trace_of_rows(mine, rank=rank, world_size=2, metadata=info) for rank, mine in enumerate(rows)
    )
    assert account.verdicts[0].losses == ()
    assert account.verdicts[0].late_ns_per_step > 0, "the figures are there all the same"


def test_verdicts_are_in_the_document() -> None:
    document = job(transfer=((100,), (250,))).to_document()["verdicts"][0]
    assert document["losses"] == ["slow_link"]
    assert document["ranks"] == [2, 3]
    assert set(document) == {
        "group",
        "kind",
        "ranks",
        "occurrences",
        "losses",
        "late_rank",
        "late_ns_per_step",
        "compute_excess_ns_per_step",
        "transfer_ns_per_step",
        "excess_transfer_ns_per_step",
        "bus_bandwidth",
        "reference_bandwidth",
        "reference",
        "reason",
    }


@pytest.mark.skipif(not SHARED_TRACES.exists(), reason="the shared public traces are not here")
def test_no_link_of_real_traces_is_called_slow() -> None:
    """Eight ranks of a recommendation model: rank 7 comes late to the all-to-alls, most of all to the first one, before
    which nobody knows what was computed; nothing speaks against the links. Four ranks over gloo on two cores: transfers
    differ by scheduling."""
    files = sorted((SHARED_TRACES / "param" / "dlrm_kineto_8ranks").glob("*.json*"))
    account = account_of(read_trace(file, cache=False) for file in files)
    assert {(one.kind, one.losses, one.late_rank) for one in account.verdicts} == {
        ("all_to_all", ("late_rank",), 7),
        ("all_reduce", (), None),
    }
    assert account.verdicts[0].compute_excess_ns_per_step is None
    for scenario in ("ddp", "fsdp2", "slow_data"):
        gloo = sorted((SHARED_TRACES / "torch213-cpu-gloo").glob(f"{scenario}_rank*.json.gz"))
        found = account_of(read_trace(file, cache=False) for file in gloo).verdicts
        assert found
        assert all(one.losses == () for one in found)
