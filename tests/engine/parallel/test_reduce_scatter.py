"""Reduce-scatter over gloo by an exchange and a sum of one's own: values to the bit, order, what gloo is handed."""

import json
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json

from drivetrain.engine.parallel.collectives import Group
from drivetrain.engine.parallel.flat_collectives import CountedGroup
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.reduce_scatter import add_in_order, exchanges
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

DTYPES = {
    "fp64": (torch.float64, torch.float64),
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16 into fp32": (torch.bfloat16, torch.float32),
}


@contextmanager
def everybody():
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        yield group.ranks.rank, group.size


def buffer_of(rank: int, size: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of very different sizes: added in another order, the sum is another."""
    generator = torch.Generator().manual_seed(100 * length + rank)
    values = torch.randn(size, length, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** torch.randint(-3, 4, (size, length), generator=generator)).to(dtype)


def expected(rank: int, size: int, length: int, name: str) -> list[float]:
    """The sum in the order of ranks, in fp32 where elements have 16 bits, rounded once to the result's dtype."""
    dtype, result = DTYPES[name]
    wide = np.float64 if dtype == torch.float64 else np.float32
    total = np.zeros(length, wide)
    for other in range(size):
        row = buffer_of(other, size, length, dtype)[rank]
        total = row.to(torch.float64).numpy().astype(wide) + (total if other else wide(0))
    return torch.from_numpy(np.atleast_1d(total)).to(result).tolist()


def shares(name: str, lengths: tuple[int, ...]) -> list[list[float]]:
    dtype, result = DTYPES[name]
    with everybody() as (rank, size):
        group = CountedGroup(dist.group.WORLD, "dp_shard", Traffic())
        started = []
        for length in lengths:
            share, buffer = torch.full((length,), 7.0, dtype=result), buffer_of(rank, size, length, dtype)
            started.append((share, group.reduce_scatter(share, buffer)))
        # Several under way at once, and waited for in any order.
        for _, work in reversed(started):
            work.wait()
            assert work.is_completed()
        return [share.tolist() for share, _ in started]


@pytest.mark.parametrize("name", list(DTYPES))
@pytest.mark.parametrize("size", [2, 3])
def test_a_share_is_the_sum_in_the_order_of_ranks_to_the_bit(name: str, size: int) -> None:
    lengths = (1, 7, 1000)
    for rank, found in enumerate(on_kept_ranks(shares, size, name, lengths)):
        for length, share in zip(lengths, found, strict=True):
            assert share == expected(rank, size, length, name), f"rank {rank}, {length} elements"


def test_sums_of_16_bits_are_rounded_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    narrow, wide = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
    add_in_order(rows, narrow)
    add_in_order(rows, wide)
    assert (rows[0] + rows[1] + rows[2]).item() == 256, "in bf16, each addition is lost"
    assert (narrow.item(), wide.item()) == (258, 258)


def test_one_row_is_its_own_sum() -> None:
    rows, total = torch.tensor([[3.0, 4.0]]), torch.empty(2)
    add_in_order(rows, total)
    assert total.tolist() == [3.0, 4.0]


def handed_to_gloo() -> list[tuple[str, int]]:
    """What gloo was asked for while a reduce-scatter of each kind ran: name and elements."""
    with everybody() as (rank, size):
        traffic = Traffic()
        counted = CountedGroup(dist.group.WORLD, "dp_shard", traffic)
        plain = Group("tp", dist.group.WORLD, size, rank, traffic)
        # By number, not by place: torch keeps the latest 2,000 or so of a process.
        before = max((one["record_id"] for one in _recorded()), default=-1)
        share = torch.empty(5)
        counted.reduce_scatter(share, torch.ones(size, 5)).wait()
        part = plain.reduce_scatter(torch.ones(3, 4 * size), dim=1)
        assert (share.tolist(), part.tolist()) == ([size] * 5, [[size] * 4] * 3)
        assert {key: (count.calls, count.bytes) for key, count in traffic.counts.items()} == {
            ("dp_shard", "reduce_scatter"): (1, 4 * 5 * size),
            ("tp", "reduce_scatter"): (1, 4 * 12 * size),
        }
        return [
            (entry["profiling_name"], sum(int(np.prod(one)) for one in entry["input_sizes"]))
            for entry in _recorded()
            if entry["record_id"] > before
        ]


def _recorded() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_dump_fr_trace_json())["entries"]
    return found


def test_gloo_is_asked_for_an_exchange_and_for_nothing_that_sums_everything_everywhere() -> None:
    for found in on_kept_ranks(handed_to_gloo, 3):
        assert found == [("gloo:all_to_all", 15), ("gloo:all_to_all", 36)]


def whose() -> list[bool]:
    with everybody():
        return [
            exchanges(dist.group.WORLD, torch.device("cpu")),
            exchanges(dist.group.WORLD, torch.device("cuda")),
            exchanges(dist.new_group(), torch.device("cpu")),
        ]


def test_only_tensors_on_a_cpu_over_gloo_are_exchanged() -> None:
    assert on_kept_ranks(whose, 2) == [[True, False, True]] * 2
