"""Collectives in levels: equal results, counted bytes between machines, order, layouts that have no two levels.

Machines are simulated: ranks are told how many of them lie on each.
"""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from drivetrain.config.hosts import by_host, why_one_level
from drivetrain.config.layout import Layout
from drivetrain.engine.parallel import hierarchy
from drivetrain.engine.parallel.flat_collectives import CountedGroup
from drivetrain.engine.parallel.hierarchy import Hierarchy, LevelGroups
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

CPU = torch.device("cpu")
LENGTHS = (1, 5, 12, 1001)


@contextmanager
def in_levels(per_host: int, **sizes: int):
    """This rank's mesh; data parallelism over machines of ``per_host`` ranks."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        layout = Layout(**{"dp": group.size, **sizes})
        yield Mesh.form(layout, group.ranks.rank).in_levels(per_host, CPU)


def numbers(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def differences(per_host: int) -> float:
    """The largest relative difference between levels and flat, of all collectives and lengths, all at once."""
    with in_levels(per_host) as mesh:
        size, rank = mesh.size("dp"), mesh.index("dp")
        levels = CountedGroup(mesh.group("dp"), "dp", Traffic(), mesh.hierarchy("dp"))
        flat = CountedGroup(mesh.group("dp"), "dp", Traffic())
        pairs, works = [], []
        for length in LENGTHS:
            for group in (levels, flat):
                whole = numbers(rank, length)
                rows, share = numbers(100 + rank, size, length), torch.empty(length, dtype=torch.float64)
                gathered = torch.empty(size, length, dtype=torch.float64)
                works += [
                    group.all_reduce(whole),
                    group.reduce_scatter(share, rows),
                    group.all_gather(gathered, whole.new_full((length,), rank + 1.0)),
                ]
                pairs.append((whole, share, gathered))
        # Later ones first: each waits for itself alone.
        for work in reversed(works):
            work.wait()
        worst = 0.0
        for ours, theirs in zip(pairs[::2], pairs[1::2], strict=True):
            assert torch.equal(ours[2], theirs[2]), "what is gathered is gathered to the bit"
            for one, other in zip(ours[:2], theirs[:2], strict=True):
                worst = max(worst, float((one - other).norm() / other.norm()))
        return worst


@pytest.mark.parametrize(("ranks", "per_host"), [(4, 2), pytest.param(6, 3, marks=pytest.mark.long)])
def test_levels_give_the_results_of_a_flat_collective(ranks: int, per_host: int) -> None:
    found = on_kept_ranks(differences, ranks, per_host)
    assert max(found) < 1e-12


def sums_twice() -> bool:
    with in_levels(2) as mesh:
        group = CountedGroup(mesh.group("dp"), "dp", Traffic(), mesh.hierarchy("dp"))
        found = []
        for _ in range(2):
            whole = numbers(mesh.index("dp"), 999).float()
            group.all_reduce(whole).wait()
            found.append(whole)
        return torch.equal(*found)


def test_sums_are_the_same_in_each_run_to_the_bit() -> None:
    assert all(on_kept_ranks(sums_twice, 4))


def traffic_of_levels() -> dict[tuple[str, str], tuple[int, int]]:
    with in_levels(2) as mesh:
        traffic = Traffic()
        group = CountedGroup(mesh.group("dp"), "dp", traffic, mesh.hierarchy("dp"))
        group.all_reduce(torch.ones(11)).wait()
        group.reduce_scatter(torch.empty(3), torch.ones(4, 3)).wait()
        group.all_gather(torch.empty(4, 3), torch.ones(3)).wait()
        return {key: (count.calls, count.bytes) for key, count in traffic.counts.items()}


def test_payloads_are_counted_by_level() -> None:
    for found in on_kept_ranks(traffic_of_levels, 4):
        assert found == {
            # 11 numbers are padded to two halves of 6; one half travels between machines, and is gathered.
            ("dp_host", "reduce_scatter"): (2, 4 * 12 + 4 * 12),
            ("dp_across", "all_reduce"): (1, 4 * 6),
            # The rows of the two ranks at the same place.
            ("dp_across", "reduce_scatter"): (1, 4 * 6),
            ("dp_across", "all_gather"): (1, 4 * 3),
            ("dp_host", "all_gather"): (2, 4 * 6 + 4 * 6),
        }


def half_precision(exchanges: bool) -> list[float]:
    with in_levels(2) as mesh:
        levels = mesh.hierarchy("dp")
        assert levels is not None
        levels._exchanges = exchanges
        group = CountedGroup(mesh.group("dp"), "dp", Traffic(), mesh.hierarchy("dp"))
        share = torch.empty(1)
        # Of each machine the sum is rounded, to travel in 16 bits: 256 + 1 is 256 there, and 1 + 1 is 2.
        values = torch.full((4, 1), (256.0, 1.0, 1.0, 1.0)[mesh.index("dp")], dtype=torch.bfloat16)
        group.reduce_scatter(share, values).wait()
        return share.tolist()


@pytest.mark.parametrize("exchanges", [True, False], ids=["gloo", "a library whose sums have one dtype"])
def test_sums_of_16_bits_are_rounded_once_for_the_wire_between_machines(exchanges: bool) -> None:
    assert on_kept_ranks(half_precision, 4, exchanges) == [[258.0]] * 4


class PlayedStream:
    """Counts what is asked of a stream of CUDA; runs nothing."""

    name = "played"

    def __init__(self) -> None:
        self.recorded, self.waited = 0, 0

    def record(self) -> "PlayedStream":
        self.recorded += 1
        return self

    def run(self, _work: object, _tensors: object = ()) -> "PlayedStream":
        return self

    def wait(self, _event: object) -> None:
        self.waited += 1


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_on_cuda_a_collective_is_ordered_by_the_streams_in_which_it_is_handed_over_and_waited_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, handed_over, waits = streams = PlayedStream(), PlayedStream(), PlayedStream()
    current = list(streams[:1])
    monkeypatch.setattr(hierarchy, "current_stream", lambda _device: current[0])
    monkeypatch.setattr(hierarchy, "open_stream", lambda _device, _name: PlayedStream())
    monkeypatch.setattr(hierarchy, "exchanges", lambda _group, _device: False)
    nobody: Any = None
    groups = LevelGroups(nobody, nobody, nobody, hosts=2, per_host=2)
    levels = Hierarchy("dp", groups, torch.device("cuda"))
    current[0] = handed_over
    rows, row = torch.ones(4, 3), torch.ones(3)
    work = {
        "all_reduce": lambda: levels.all_reduce(row, "dp", Traffic()),
        "reduce_scatter": lambda: levels.reduce_scatter(row, rows, "dp", Traffic()),
        "all_gather": lambda: levels.all_gather(rows, row, "dp", Traffic()),
    }[kind]()
    current[0] = waits
    work.wait()
    assert [(one.recorded, one.waited) for one in (built, handed_over, waits)] == [(0, 0), (1, 0), (0, 1)]


def groups_with_levels(per_host: int, shard: int | None) -> dict[str, tuple[int, int] | None]:
    with in_levels(per_host, dp_shard=shard) as mesh:
        found = {}
        for dim in ("dp", "dp_shard", "dp_replicate", "tp"):
            levels = mesh.hierarchy(dim)
            found[dim] = None if levels is None else (levels.hosts, levels.per_host)
        if shard is None:
            assert mesh.hierarchy("dp") is mesh.hierarchy("dp_shard"), "one group has one order"
        return found


@pytest.mark.parametrize(
    ("per_host", "shard", "expected"),
    [
        (2, None, {"dp": (2, 2), "dp_shard": (2, 2)}),
        (4, None, {}),
        (1, None, {}),
        (3, None, {}),
        # The shards of a model lie on a machine, replicas on several: what is left is one level each.
        (2, 2, {"dp": (2, 2)}),
    ],
)
def test_groups_have_levels_where_they_lie_on_several_machines_with_several_ranks_each(
    per_host: int, shard: int | None, expected: dict[str, tuple[int, int]]
) -> None:
    wanted = {"dp": None, "dp_shard": None, "dp_replicate": None, "tp": None, **expected}
    assert on_kept_ranks(groups_with_levels, 4, per_host, shard) == [wanted] * 4


@pytest.mark.parametrize(
    ("layout", "per_host", "reason"),
    [
        (Layout(dp=4), 2, None),
        (Layout(tp=2, dp=4), 4, None),
        (Layout(dp=4), 4, "on one machine"),
        (Layout(dp=4), 1, "each machine has one"),
        (Layout(tp=2, dp=2), 2, "each machine has one"),
        (Layout(dp=4), 3, "different numbers of the ranks of dp that communicate: 1, 3"),
    ],
)
def test_why_a_layout_has_one_level(layout: Layout, per_host: int, reason: str | None) -> None:
    found = why_one_level(layout, "dp", per_host)
    assert found is None if reason is None else found is not None and reason in found


def test_ranks_are_dealt_out_to_machines_in_order() -> None:
    assert by_host([1, 3, 5, 7], 4) == [[1, 3], [5, 7]]
