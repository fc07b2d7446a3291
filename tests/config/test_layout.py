"""Ranks have one place each, and groups of every dimension share the ranks out among them."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config import layout_of, load_config
from drivetrain.config.hosts import crossing_groups
from drivetrain.config.layout import DIMENSIONS, ORDER, Layout, is_order, least_processes

SIZES = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shard, replicate = draw(SIZES), draw(SIZES)
    return Layout(
        tp=draw(SIZES),
        cp=draw(st.integers(1, 2)),
        pp=draw(SIZES),
        dp=shard * replicate,
        dp_shard=draw(st.sampled_from([None, shard])),
        order=draw(st.sampled_from(sorted(permutations(ORDER)))),
    )


@given(layouts())
def test_a_rank_and_its_place_are_one_to_one(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank_of(place) for place in places] == list(range(layout.world_size))
    assert len({tuple(sorted(place.items())) for place in places}) == layout.world_size
    for place in places:
        assert set(place) == set(DIMENSIONS)
        assert all(0 <= place[dim] < layout.size(dim) for dim in DIMENSIONS)
        assert place["dp"] == place["dp_replicate"] * layout.size("dp_shard") + place["dp_shard"]


@given(layouts())
def test_groups_of_a_dimension_partition_the_ranks_and_differ_in_it_alone(layout: Layout) -> None:
    for dim in DIMENSIONS:
        groups = layout.groups(dim)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        moving = {"dp": {"dp", "dp_shard", "dp_replicate"}, "dp_shard": {"dp", "dp_shard"}}
        moving |= {"dp_replicate": {"dp", "dp_replicate"}}
        for group in groups:
            places = [layout.coordinates(rank) for rank in group]
            assert [place[dim] for place in places] == list(range(layout.size(dim)))
            for other in set(DIMENSIONS) - moving.get(dim, {dim}):
                assert len({place[other] for place in places}) == 1


@given(layouts())
def test_a_mesh_in_row_major_order_numbers_ranks_as_the_layout_does(layout: Layout) -> None:
    stride = 1
    strides = {}
    for name in reversed(layout.mesh_dimensions):
        strides[name] = stride
        stride *= layout.size(name)
    assert stride == layout.world_size
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        assert sum(place[name] * strides[name] for name in layout.mesh_dimensions) == rank


def test_neighbours_share_layers_and_data_parallel_ranks_lie_apart_by_default() -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_hybrid_shards_lie_inside_replicas() -> None:
    layout = Layout(dp=4, dp_shard=2)
    assert layout.groups("dp_shard") == [[0, 1], [2, 3]]
    assert layout.groups("dp_replicate") == [[0, 2], [1, 3]]


def test_a_configuration_says_its_layout_and_its_least_processes() -> None:
    overrides = [
        "parallelism.tensor_model_parallel_size=2",
        "parallelism.pipeline_model_parallel_size=2",
        "parallelism.zero_stage=3",
        "parallelism.hybrid_shard_size=2",
        "parallelism.rank_order=pp-tp-cp-dp",
    ]
    config = load_config("llama-2m", overrides).config
    assert least_processes(config) == 4
    assert layout_of(config, 16) == Layout(tp=2, pp=2, dp=4, dp_shard=2, order=("pp", "tp", "cp", "dp"))
    plain = load_config(
        "llama-2m", ["parallelism.hybrid_shard_size=2", "parallelism.data_parallel_size=4"]
    ).config
    assert least_processes(plain) == 4
    assert layout_of(plain, 4) == Layout(dp=4), "without a ZeRO stage nothing is sharded"


def test_a_tensor_parallel_group_that_leaves_its_machine_is_warned_of_with_a_remedy() -> None:
    assert crossing_groups(Layout(tp=4, dp=2), 4) == []
    assert crossing_groups(Layout(tp=2, pp=2, dp=2), 8) == []
    (order,) = crossing_groups(Layout(tp=2, dp=4, order=("dp", "tp", "pp", "cp")), 4)
    assert order.startswith("4 of 4 tensor-parallel groups lie on several machines (the first is 0, 4)")
    assert order.endswith("parallelism.rank_order = tp-cp-pp-dp keeps each of them on one")
    (size,) = crossing_groups(Layout(tp=8, dp=2), 4)
    assert size.endswith("tensor_model_parallel_size = 4 would stay on a machine of 4 processes")
    (some,) = crossing_groups(Layout(tp=4, dp=3), 6)
    assert some.startswith("1 of 3 tensor-parallel groups")
    assert some.endswith("tensor_model_parallel_size = 3 would stay on a machine of 6 processes")


def test_orders() -> None:
    assert is_order("tp-cp-pp-dp")
    assert not is_order("tp-tp-pp-dp")
    assert not is_order("tp-cp-pp")
