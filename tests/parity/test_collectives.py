"""Collectives that are each other's derivative, and what they count."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from drivetrain.engine.parallel.collectives import Group, copied, gathered, joined, scattered, summed
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks


@contextmanager
def group_of_all():
    with join(Ranks.from_environment(), "cpu", 1.0) as ranks:
        rank, size = ranks.ranks.rank, ranks.size
        yield Group("tp", dist.group.WORLD, size, rank, Traffic())


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sum_over(group: Group, value: torch.Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item()


def inner_products(name: str, dim: int) -> tuple[float, float]:
    """<f(x), y> and <x, f'(y)>, over all ranks' values: equal if the backward is the derivative of the forward.

    A value that all ranks hold alike is one value, and counts on one rank.
    """
    with group_of_all() as group:
        own, alike = 100 + group.index, 7
        functions = {
            "copied": lambda x: copied(x, group),
            "summed": lambda x: summed(x, group),
            "gathered": lambda x: gathered(x, group, dim),
            "scattered": lambda x: scattered(x, group, dim),
            "joined": lambda x: joined(x, group, 3 * group.index, 3 * group.size),
        }
        x = numbers(alike if name == "copied" else own, 2 * group.size, 3 * group.size)
        x = (x[:, :3] if name == "joined" else x).requires_grad_()
        out = functions[name](x)
        same_output = name in ("summed", "joined")
        y = numbers(alike + 1 if same_output else own + 50, *out.shape)
        (gradient,) = torch.autograd.grad(out, x, y)
        assert gradient.shape == x.shape
        left, right = (out.detach() * y).sum(), (x.detach() * gradient).sum()
        return (
            left.item() if same_output else sum_over(group, left),
            right.item() if name == "copied" else sum_over(group, right),
        )


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("copied", 0),
        ("summed", 0),
        ("gathered", 0),
        ("gathered", 1),
        ("scattered", 0),
        ("scattered", 1),
        ("joined", 1),
    ],
)
def test_backward_is_the_derivative_of_forward(name: str, dim: int) -> None:
    for left, right in on_kept_ranks(inner_products, 3, name, dim):
        assert abs(left) > 1e-3
        assert left == pytest.approx(right, rel=1e-12)


def values_and_traffic(dtype: torch.dtype) -> dict[str, object]:
    with group_of_all() as group:
        x = (torch.arange(12.0).view(3, 4).t() + 100 * group.index).to(dtype)
        assert not x.is_contiguous()
        before = x.clone()
        found: dict[str, object] = {
            "copied": copied(x, group).tolist(),
            "summed": summed(x, group).tolist(),
            "gathered": gathered(x, group).tolist(),
            "gathered_columns": gathered(x, group, 1).tolist(),
            "scattered": scattered(x, group).tolist(),
            "joined": joined(x[:, :2], group, 2 * group.index, 4).tolist(),
            "largest": group.all_reduce(x, dist.ReduceOp.MAX).tolist(),
        }
        assert torch.equal(x, before), "the input was written to"
        found["traffic"] = {key: (count.calls, count.bytes) for key, count in group.traffic.counts.items()}
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_counted_payloads(dtype: torch.dtype) -> None:
    first = torch.arange(12.0).view(3, 4).t()
    second = first + 100
    total = first + second
    for rank, found in enumerate(on_kept_ranks(values_and_traffic, 2, dtype)):
        assert found["copied"] == (first, second)[rank].tolist()
        assert found["summed"] == total.tolist()
        assert found["gathered"] == torch.cat([first, second]).tolist()
        assert found["gathered_columns"] == torch.cat([first, second], 1).tolist()
        assert found["scattered"] == total.chunk(2)[rank].tolist()
        assert found["joined"] == torch.cat([first[:, :2], second[:, :2]], 1).tolist()
        assert found["largest"] == second.tolist()
        size = dtype.itemsize
        assert found["traffic"] == {
            # Summed, joined (4 x 4) and largest; parts of gathered twice; the whole of scattered.
            ("tp", "all_reduce"): (3, (12 + 16 + 12) * size),
            ("tp", "all_gather"): (2, 24 * size),
            ("tp", "reduce_scatter"): (1, 12 * size),
        }
