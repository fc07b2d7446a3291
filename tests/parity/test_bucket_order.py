"""Buckets follow the order in which backward finishes gradients, agreed on by all ranks, and change no sum."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drivetrain.config.layout import Layout
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

WIDTH, DEPTH, STEPS = 12, 5, 3
BUCKET_MB = 0.0015
"""A layer of 12 x 12 in fp64 has 1,152 bytes: two of them fill a bucket."""


class Backwards(nn.Module):
    """Layers that are used in another order than they are registered in; ``skipped`` is used by nobody."""

    def __init__(self, order: Sequence[int] = (3, 0, 4, 1, 2)) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.order = order
        self.skipped = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))
        self.layers = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / 4)
            for _ in range(DEPTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = torch.tanh(x @ self.layers[index])
        return x.square().sum()


def train(stage: int, learns: bool, orders: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Buckets, gradients of each step, and the collectives that had begun when the gradient of the layer that is used
    first was ready."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        module = Backwards(orders[group.ranks.rank])
        mesh = Mesh.form(Layout(dp=group.size), group.ranks.rank)
        traffic, begun = Traffic(), list[int]()
        # Before those of the synchronisation, so that this gradient has not begun anything yet.
        module.layers[module.order[0]].register_post_accumulate_grad_hook(
            lambda _: begun.append(sum(count.calls for count in traffic.counts.values()))
        )
        sync = gradient_sync(
            module,
            mesh,
            traffic,
            zero_stage=stage,
            bucket_size_mb=BUCKET_MB,
            # What a pipeline has: the order is that of registration.
            stages=() if learns else [(module, ())],
        )
        optimizer = torch.optim.SGD([value for _, value in sync.updated()], lr=0.1)
        gradients, buckets = [], []
        for step in range(STEPS):
            x = torch.full((4, WIDTH), 0.1 * (group.ranks.rank + 1 + step), dtype=torch.float64)
            with sync.micro_batch(last=True):
                module(x).backward()
            sync.finish()
            gradients.append({name: held.tensor.numpy().copy() for name, held in sync.gradients().items()})
            sync.step(optimizer)
            sync.traffic.take()
            buckets.append(sync.buckets)  # type: ignore[attr-defined]
        return {
            "buckets": buckets,
            "gradients": gradients,
            "begun": begun,
            "parameters": {name: held.tensor.numpy().copy() for name, held in sync.parameters().items()},
        }


ORDER = (3, 0, 4, 1, 2)
READY = [f"layers.{index}" for index in reversed(ORDER)]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_buckets_are_cut_by_the_first_backward_pass_and_travel_during_the_next(stage: int) -> None:
    found = on_kept_ranks(train, 2, stage, True, [ORDER, ORDER])
    for rank in found:
        assert rank["buckets"] == [[READY[:2], READY[2:4], READY[4:], ["skipped"]]] * STEPS
        first, *others = rank["begun"]
        assert first == 0, "nothing travels before the order is known"
        assert others == [2] * (STEPS - 1), "two buckets were on their way before backward had ended"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_sums_are_to_the_bit_those_of_buckets_by_registration(stage: int) -> None:
    learned = on_kept_ranks(train, 2, stage, True, [ORDER, ORDER])
    static = on_kept_ranks(train, 2, stage, False, [ORDER, ORDER])
    for one, other in zip(learned, static, strict=True):
        assert other["buckets"] != one["buckets"]
        assert max(other["begun"]) == 0, "the first bucket waits for the layer that is used first"
        for step in range(STEPS):
            for name, value in other["gradients"][step].items():
                assert np.array_equal(one["gradients"][step][name], value), (step, name)
        for name, value in other["parameters"].items():
            assert np.array_equal(one["parameters"][name], value), name


def test_ranks_that_see_different_orders_take_the_first_ones() -> None:
    one, other = on_kept_ranks(train, 2, 0, True, [ORDER, (0, 1, 2, 3, 4)])
    assert one["buckets"] == other["buckets"]
    assert one["buckets"][0][0] == READY[:2]
    for name, value in one["gradients"][-1].items():
        assert np.array_equal(other["gradients"][-1][name], value), name
