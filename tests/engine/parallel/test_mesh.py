"""Process groups of a layout on real ranks: each dimension sums over just the ranks that the layout names."""

import torch
import torch.distributed as dist

from drivetrain.config.layout import DIMENSIONS, Layout
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
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
