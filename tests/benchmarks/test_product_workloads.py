"""The two sides of the benchmark of products: the same work, and a quarter of the memory. No time is asserted."""

import pytest
import torch

import operators
from harness import product_workloads
from harness.claims import verdict
from harness.sides import Sides


def small(key: str) -> Sides:
    # Compiled code takes seconds for each shape, and its numerics are tested elsewhere: chunked is the same products.
    return {
        "linear_cross_entropy bfloat16": lambda: product_workloads.vocabulary_loss(
            "bfloat16", 40, 16, 64, "chunked"
        ),
        "linear_cross_entropy float32": lambda: product_workloads.vocabulary_loss(
            "float32", 40, 16, 64, "chunked"
        ),
        "grouped_product bfloat16": lambda: product_workloads.experts("bfloat16", 80, 16, 24),
        "linear bfloat16": lambda: product_workloads.weight_gradient(24, 16, 40),
        "linear bfloat16 wide": lambda: product_workloads.weight_gradient(12, 16, 40),
    }[key]()


@pytest.mark.parametrize("key", list(product_workloads.product_workloads()))
def test_both_sides_of_a_product_compute_the_same(key: str) -> None:
    sides = small(key)
    operators.require_same_results(sides)
    ours, theirs = sides.ours(), sides.theirs()
    assert [(one.shape, one.dtype) for one in ours] == [(one.shape, one.dtype) for one in theirs]
    assert all(bool(one.isfinite().all()) and bool(one.any()) for one in (*ours, *theirs))
    assert key in operators.WORKLOADS


def test_a_side_with_other_labels_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = product_workloads._call

    def wrong(operator: str, backend: str):
        call = right(operator, backend)
        if backend == "eager":
            return call
        return lambda labels, **given: call(labels=labels.flip(0), **given)

    monkeypatch.setattr(product_workloads, "_call", wrong)
    with pytest.raises(operators.DifferentResultsError):
        operators.require_same_results(small("linear_cross_entropy bfloat16"))


def test_the_claims_on_the_loss_are_those_that_were_promised() -> None:
    assert (product_workloads.LOSS_TARGET, product_workloads.MEMORY_TARGET) == (1.3, 4.0)
    assert product_workloads.WORDS == 32_000
    assert small("linear_cross_entropy bfloat16").target == 0.0


@pytest.mark.long
def test_the_loss_takes_a_quarter_of_the_memory() -> None:
    ours, theirs = product_workloads.loss_live_bytes()
    # The gradient of the weight twice; one chunk's logits; and the peer's logits three times in fp32.
    assert ours > 2 * 32_000 * 2048 * 2
    assert theirs > 2.5 * 4096 * 32_000 * 4
    claim = product_workloads.loss_live_bytes_claim()
    assert claim.target == 4.0
    assert verdict(claim) == "won"


def test_the_loss_takes_less_memory_at_a_small_size_too() -> None:
    ours, theirs = product_workloads.loss_live_bytes(1500, 8, 1000)
    assert 1500 * 1000 * 2 < ours < theirs / 2


def test_the_count_of_the_loss_without_memory_is_the_count_with_it() -> None:
    from drivetrain.engine.memory import LiveBytes

    without = product_workloads.loss_live_bytes(300, 16, 500)[1]
    hidden, weight = product_workloads._drawn("bfloat16", (300, 16), (500, 16))
    labels = torch.zeros(300, dtype=torch.int64)
    with LiveBytes() as live:
        total, count = product_workloads._call("linear_cross_entropy", "eager")(
            hidden=hidden, weight=weight, labels=labels
        )
        torch.autograd.grad(total / count, (hidden, weight))
    given = sum(one.numel() * one.element_size() for one in (hidden, weight, labels))
    assert abs(live.peak_bytes - given - without) <= 0.02 * without
