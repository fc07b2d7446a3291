"""Process groups of a layout on real ranks: each dimension sums over just the ranks that the layout names."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.config import ModelConfig
from drivetrain.config.layout import DIMENSIONS, Layout
from drivetrain.engine.parallel.collectives import Group
from drivetrain.engine.parallel.mesh import Mesh, _options
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.tensor_parallel import _key_value_replicas
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks, on_ranks


def sums_over_groups(layout: Layout) -> dict[str, tuple[int, list[int], int]]:
    """For each dimension: the sum of 2**rank over its group, its ranks by torch, this rank's index."""
    with join(Ranks.from_environment(), "cpu", 1.0) as processes:
        mesh = Mesh.form(layout, processes.ranks.rank)
        found = {}
        for dim in DIMENSIONS:
            group = mesh.group(dim)
            tensor = torch.tensor(2**mesh.rank)
            if group is not None:
                dist.all_reduce(tensor, group=group)
            members = dist.get_process_group_ranks(group) if group is not None else [mesh.rank]
            assert members == mesh.ranks(dim)
            found[dim] = (int(tensor), members, mesh.index(dim))
        return found


def check(layout: Layout) -> None:
    for rank, found in enumerate(on_kept_ranks(sums_over_groups, layout.world_size, layout)):
        for dim, (total, members, index) in found.items():
            expected = next(group for group in layout.groups(dim) if rank in group)
            assert total == sum(2**member for member in expected), (dim, rank)
            assert members == expected
            assert members[index] == rank


def test_groups_of_tensor_times_data_parallel() -> None:
    check(Layout(tp=2, dp=2))


def test_groups_of_four_dimensions_with_shards_inside_replicas() -> None:
    check(Layout(tp=2, pp=1, dp=4, dp_shard=2))


def test_groups_of_three_dimensions_in_another_order() -> None:
    check(Layout(tp=2, pp=2, dp=2, order=("pp", "tp", "cp", "dp")))


def test_a_single_process_has_no_groups() -> None:
    mesh = Mesh.form(Layout(), 0)
    assert mesh.device_mesh is None
    assert all(mesh.group(dim) is None and mesh.index(dim) == 0 for dim in DIMENSIONS)
    assert mesh.submesh("dp", "tp") is None


def seconds_until_groups_give_up() -> list[float]:
    """Timeout of this rank's group along each dimension, and of the ranks that share a key and value head."""
    with join(Ranks.from_environment(), "cpu", 1.0) as processes:
        mesh = Mesh.form(Layout(tp=2, dp=2), processes.ranks.rank, timeout=timedelta(minutes=1))
        model = ModelConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            num_query_groups=1,
            seq_length=8,
            vocab_size=16,
        )
        replicas = _key_value_replicas(
            model, mesh, Group("tp", mesh.group("tp"), 2, mesh.index("tp"), Traffic())
        )
        assert replicas is not None
        groups = [mesh.group("tp"), mesh.group("dp"), replicas.process_group]
        return [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()  # type: ignore[union-attr]
            for group in groups
        ]


def test_every_group_gives_up_when_the_run_says_so() -> None:
    assert on_ranks(seconds_until_groups_give_up, 4) == [[60.0] * 3] * 4


class _Options:
    """Stands for those of NCCL, which a build for CPUs has not."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout: timedelta | None = None


class _Nccl:
    Options = _Options


def test_tensor_parallelism_goes_first_where_streams_have_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _Nccl, raising=False)
    limit = timedelta(minutes=3)
    options = _options("tp", "cuda", limit)
    assert options.is_high_priority_stream
    assert options._timeout == limit, "torch would warn of another than the group's"
    assert all(_options(dim, "cuda", limit) is None for dim in ("dp", "dp_shard", "pp", "cp"))
    assert _options("tp", "cpu", limit) is None, "a gloo group has threads of its own"


def _behind_what_does_not_come() -> list[bool]:
    """Ranks 0 and 1 have sums along dp under way that ranks 2 and 3 only join once everybody's sum along tp is done."""
    with join(Ranks.from_environment(), "cpu", 1.0) as processes:
        rank = processes.ranks.rank
        mesh = Mesh.form(Layout(tp=2, dp=2), rank)
        sums = [torch.ones(1000) for _ in range(4)]
        along_tp = torch.ones(10)
        works: list[Any] = []
        if rank < 2:
            works = [dist.all_reduce(one, group=mesh.group("dp"), async_op=True) for one in sums]
        dist.all_reduce(along_tp, group=mesh.group("tp"))
        done = [work.is_completed() for work in works]
        processes.barrier()
        if rank >= 2:
            works = [dist.all_reduce(one, group=mesh.group("dp"), async_op=True) for one in sums]
        for work in works:
            work.wait()
        assert all(one[0] == 2 for one in (*sums, along_tp))
        return done


def test_a_sum_along_tp_never_queues_behind_sums_along_dp() -> None:
    assert on_kept_ranks(_behind_what_does_not_come, 4) == [[False] * 4, [False] * 4, [], []]
