"""Process groups of a layout on real ranks: each dimension sums over just the ranks that the layout names."""

from datetime import timedelta

import torch
import torch.distributed as dist

from drivetrain.config import ModelConfig
from drivetrain.config.layout import DIMENSIONS, Layout
from drivetrain.engine.parallel.collectives import Group
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.tensor_parallel import _key_value_replicas
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_ranks


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
    for rank, found in enumerate(on_ranks(sums_over_groups, layout.world_size, layout)):
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
