"""The norm of a gradient that is spread over ranks counts every element once, however it is cut or repeated."""

import pytest
import torch

from drivetrain.config import Layout
from drivetrain.engine.parallel.gradient_norm import (
    clip_held_gradients,
    counts_here,
    dimensions_of_norm,
    norm_of_held,
)
from drivetrain.engine.parallel.gradient_sync import Held
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.placement import Placement, Shard, even_shard
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

SHAPES = {"cut": (8, 4), "alike": (6,), "shared": (4, 2), "stage0": (3,), "stage1": (5,), "tied": (4, 4)}


def whole_gradients() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()
    }


def placements(mesh: Mesh, zero: bool) -> dict[str, Placement]:
    """What this rank holds of each: cut, held alike, shared by two ranks of four, of one stage, tied."""
    tp, parts = mesh.index("tp"), mesh.size("tp")
    everywhere = frozenset({"tp"})
    half, replica = divmod(tp, max(1, parts // 2))
    found = {
        "cut": Placement((8, 4), (even_shard("tp", 0, (8, 4), tp, parts),)),
        "alike": Placement((6,), replicated=everywhere),
        "shared": Placement((4, 2), (Shard("tp", 0, 2 * half, 2, replica=replica),) if parts > 1 else ()),
        "tied": Placement((4, 4), replicated=everywhere | {"pp"}),
    }
    if mesh.size("pp") == 1:
        found |= {name: Placement(SHAPES[name], replicated=everywhere) for name in ("stage0", "stage1")}
    else:
        own = f"stage{mesh.index('pp')}"
        found[own] = Placement(SHAPES[own], replicated=everywhere)
        if mesh.index("pp") == 1:
            # Of a stage, so that the others are of the first one alone.
            found = {name: found[name] for name in ("tied", own)}
    if not zero:
        return {name: placement.replicated_over("dp") for name, placement in found.items()}
    cut = {}
    for name, placement in found.items():
        rows = placement.slices()[0]
        middle = rows.start + (rows.stop - rows.start + 1) // 2
        first, last = (rows.start, middle) if mesh.index("dp_shard") == 0 else (middle, rows.stop)
        cut[name] = placement.cut(Shard("dp_shard", 0, first, last - first))
    return cut


def clipped(layout: Layout, zero: bool) -> tuple[float, float, list[str], float]:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(layout, group.ranks.rank)
        whole = whole_gradients()
        held = {
            name: Held(whole[name][placement.slices()].clone(), placement)
            for name, placement in placements(mesh, zero).items()
        }
        traffic = Traffic()
        norm, factor = clip_held_gradients(held, 0.5, mesh, traffic)
        worst = max(
            float((one.tensor - factor * whole[name][one.placement.slices()]).abs().sum())
            for name, one in held.items()
        )
        return float(norm), float(factor), sorted(dim for dim, _ in traffic.counts), worst


@pytest.mark.parametrize(
    ("layout", "zero", "dims"),
    [
        (Layout(tp=2), False, ["tp"]),
        (Layout(tp=4), False, ["tp"]),
        (Layout(dp=2), False, []),
        (Layout(dp=2), True, ["dp_shard"]),
        (Layout(tp=2, dp=2), False, ["tp"]),
        (Layout(tp=2, pp=2), False, ["pp", "tp"]),
        (Layout(tp=2, dp=2, order=("dp", "tp", "pp", "cp")), True, ["dp_shard", "tp"]),
        (Layout(dp=4, dp_shard=2), True, ["dp_shard"]),
    ],
)
def test_the_norm_and_the_clipped_gradients_are_those_of_one_process(
    layout: Layout, zero: bool, dims: list[str]
) -> None:
    expected = torch.cat([value.flatten() for value in whole_gradients().values()]).norm().item()
    for norm, factor, summed_over, worst in on_kept_ranks(clipped, layout.world_size, layout, zero):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert factor == pytest.approx(0.5 / (expected + 1e-6), rel=1e-12)
        assert summed_over == dims, "one sum for each dimension that cuts, and no other"
        assert worst < 1e-12


def many() -> torch.Tensor:
    """Torch's own norm of these, and of their halves, is 1e-4 too small in fp32."""
    return torch.randn(4_000_003, 1, generator=torch.Generator().manual_seed(1))


def norm_of_many(layout: Layout) -> float:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(layout, group.ranks.rank)
        first, count = (0, 2_000_001) if mesh.index("tp") == 0 else (2_000_001, 2_000_002)
        placement = Placement((4_000_003, 1), (Shard("tp", 0, first, count),))
        held = {"weight": Held(many()[placement.slices()], placement)}
        return float(norm_of_held(held, mesh, Traffic()))


def test_the_norm_of_many_elements_in_fp32_does_not_depend_on_the_layout() -> None:
    expected = many().double().norm().item()
    whole = {"weight": Held(many(), Placement((4_000_003, 1)))}
    assert float(norm_of_held(whole, Mesh(Layout(), 0, None), Traffic())) == pytest.approx(expected, rel=2e-7)
    for norm in on_kept_ranks(norm_of_many, 2, Layout(tp=2)):
        assert norm == pytest.approx(expected, rel=2e-7)


def test_of_ranks_that_hold_the_same_the_first_counts() -> None:
    first, second = (Mesh(Layout(tp=2, pp=2), rank, None) for rank in (0, 1))
    last = Mesh(Layout(tp=2, pp=2), 2, None)
    alike, tied = Placement((4,)), Placement((4,), replicated=frozenset({"tp", "pp"}))
    assert [counts_here(alike, mesh, ("tp", "pp")) for mesh in (first, second, last)] == [True, False, True]
    assert [counts_here(tied, mesh, ("tp", "pp")) for mesh in (first, second, last)] == [True, False, False]
    assert dimensions_of_norm({"a": alike}, first) == ("tp", "pp")
