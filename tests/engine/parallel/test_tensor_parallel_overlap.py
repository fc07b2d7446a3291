"""Products in chunks: no row lost, what is sent is finished, what is read has arrived, and the order that hides it.

The wire is pretended: of a group of two ranks that hold the same, here is one. What travels is not a number until it
was waited for, and what was handed over is looked at when it is handed over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from drivetrain.engine.ops import gate_up_product, linear, qkv_product
from drivetrain.engine.parallel import chunked_products, tensor_parallel_overlap
from drivetrain.engine.parallel.chunked_products import (
    products_of_copied,
    products_of_gathered,
    scattered_product,
    summed_product,
)
from drivetrain.engine.parallel.collectives import Group
from drivetrain.engine.parallel.row_chunks import RowChunks
from drivetrain.engine.parallel.tensor_parallel_overlap import Chunks

RANKS = 2
CHUNKED = {
    "copied": products_of_copied,
    "gathered": products_of_gathered,
    "summed": summed_product,
    "scattered": scattered_product,
}


@given(rows=st.integers(0, 40), parts=st.integers(1, 5), wanted=st.integers(1, 50))
def test_every_row_is_in_one_chunk_and_none_is_empty(rows: int, parts: int, wanted: int) -> None:
    chunks = RowChunks.of(rows, parts, wanted)
    assert chunks.count == max(1, min(wanted, rows))
    whole = torch.arange(2.0 * parts * rows).view(-1, 2)
    taken = [chunks.taken(whole, index) for index in range(chunks.count)]
    sizes = [len(one) // parts for one in taken]
    assert max(sizes) - min(sizes) <= 1
    assert rows == 0 or min(sizes) >= 1
    again = torch.full_like(whole, float("nan"))
    for index, one in enumerate(taken):
        assert one.is_contiguous()
        chunks.put(again, index, one)
    assert torch.equal(again, whole)
    chunked = torch.cat(taken)
    assert torch.equal(chunks.in_order(chunked), whole)
    for index, one in enumerate(taken):
        assert torch.equal(chunked[chunks.behind_one_another(index)], one)


@given(rows=st.integers(2, 30), parts=st.integers(2, 4), wanted=st.integers(2, 9))
def test_a_chunk_has_the_same_rows_of_every_part(rows: int, parts: int, wanted: int) -> None:
    chunks = RowChunks.of(rows, parts, wanted)
    whole = torch.arange(parts * rows).view(-1, 1)
    for index in range(chunks.count):
        of_parts = chunks.taken(whole, index).view(parts, -1)
        assert torch.equal(of_parts % rows, of_parts[:1].expand_as(of_parts))
        assert torch.equal(of_parts[:, 0] // rows, torch.arange(parts))


def test_more_chunks_than_rows_are_as_many_as_rows() -> None:
    assert Chunks.of_all(64).of_rows(5) == Chunks.of_all(5)
    assert Chunks(qkv=1, output=2, gate_up=3, down=9).of_rows(2) == Chunks(1, 2, 2, 2)


@dataclass
class Travelling:
    """What stands for torch's ``Work``."""

    wire: "Wire"
    number: int
    arrive: Callable[[], object]

    def wait(self) -> None:
        self.wire.log.append(f"wait {self.number}")
        self.arrive()


@dataclass
class Wire:
    """Collectives of two ranks that hold the same."""

    size: int = RANKS
    log: list[str] = field(default_factory=list)
    begun: int = 0

    def all_reduce(self, tensor: Tensor) -> Travelling:
        return self._begin(tensor, RANKS * tensor)

    def reduce_scatter(self, share: Tensor, buffer: Tensor) -> Travelling:
        assert buffer.shape == (RANKS, share.numel())
        return self._begin(share, RANKS * buffer[0])

    def all_gather(self, buffer: Tensor, share: Tensor) -> Travelling:
        assert buffer.shape == (RANKS, share.numel())
        return self._begin(buffer, share.expand(RANKS, -1).clone())

    def _begin(self, target: Tensor, result: Tensor) -> Travelling:
        assert not result.isnan().any(), "something is sent that is not there yet"
        assert target.is_contiguous()
        self.log.append(f"begin {self.begun}")
        self.begun += 1
        target.fill_(float("nan"))
        return Travelling(self, self.begun - 1, lambda: target.copy_(result))


class Matrices:
    """Products as torch's own, which are noted."""

    def __init__(self, wire: Wire, *weights: Tensor) -> None:
        self.weights = weights
        self.biases: tuple[Tensor | None, ...] = (None,) * len(weights)
        self.wire = wire

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        self.wire.log.append("product")
        return tuple(functional.linear(x, weight) for weight in self.weights)

    def gradient_of_input(self, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        self.wire.log.append("input")
        return cast(Tensor, sum(one @ weight for one, weight in zip(gradients, weights, strict=True)))

    def gradients_of_weights(self, gradients: Sequence[Tensor], x: Tensor) -> Sequence[Tensor]:
        self.wire.log.append("weights")
        return [one.t() @ x for one in gradients]


@dataclass
class Case:
    """What one way of computing gave."""

    outputs: list[Tensor]
    of_input: Tensor
    of_weights: list[Tensor]
    forward_log: list[str]
    backward_log: list[str]


def computed(name: str, chunks: int, monkeypatch: pytest.MonkeyPatch, rows: int = 10) -> Case:
    """Forward and backward on the rank that is there."""
    wire = Wire()
    monkeypatch.setattr(chunked_products, "_wire", lambda group: wire)
    generator = torch.Generator().manual_seed(7)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    x = numbers(rows, 6)
    count = 1 if name in ("summed", "scattered") else 3
    weights = [numbers(4 + index, 6) for index in range(count)]
    group = Group("tp", cast(Any, None), RANKS, 0, cast(Any, None))
    found = CHUNKED[name](x, group, cast(Any, Matrices(wire, *weights)), chunks)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    forward_log, wire.log, wire.begun = wire.log, [], 0
    gradients = [numbers(*one.shape).detach() for one in outputs]
    of_input, *of_weights = torch.autograd.grad(outputs, [x, *weights], gradients)
    return Case([one.detach() for one in outputs], of_input, of_weights, forward_log, wire.log)


@pytest.mark.parametrize("chunks", [2, 3, 7, 99])
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_compute_what_one_piece_does(name: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows are not divisible by any of these numbers but 2, and of 99 chunks ten are left, or five."""
    expected = computed(name, 1, monkeypatch)
    found = computed(name, chunks, monkeypatch)
    for one, other in zip(
        [*found.outputs, found.of_input, *found.of_weights],
        [*expected.outputs, expected.of_input, *expected.of_weights],
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_chunk_travels_while_the_next_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    summed = computed("summed", 3, monkeypatch)
    assert summed.forward_log[:6] == ["product", "begin 0", "product", "begin 1", "product", "begin 2"]
    assert summed.forward_log[6:] == ["wait 0", "wait 1", "wait 2"]
    assert summed.backward_log == ["input", "weights"]
    scattered = computed("scattered", 3, monkeypatch)
    assert scattered.forward_log == summed.forward_log
    begins, arrivals = ["begin 0", "begin 1", "begin 2"], ["wait 0", "wait 1", "wait 2"]
    alternating = ["wait 0", "input", "wait 1", "input", "wait 2", "input"]
    assert scattered.backward_log == [*begins, *alternating, "weights"]
    gathered = computed("gathered", 3, monkeypatch)
    assert gathered.forward_log == [*begins, "wait 0", "product", "wait 1", "product", "wait 2", "product"]
    copied = computed("copied", 3, monkeypatch)
    assert copied.forward_log == ["product"]
    sent = ["input", "begin 0", "input", "begin 1", "input", "begin 2"]
    for one in (gathered, copied):
        assert one.backward_log == [*sent, "weights", *arrivals], (
            "the weights' gradients hide what travels last"
        )


@pytest.mark.parametrize("name", ["copied", "gathered", "scattered"])
def test_without_waiting_what_has_not_arrived_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire shows a race: this is what it looks like."""
    monkeypatch.setattr(Travelling, "wait", lambda self: None)
    found = computed(name, 3, monkeypatch)
    assert found.of_input.isnan().any()


def test_backward_twice_waits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is kept, of which the weights' gradients are not wanted the first time, as in a split backward."""
    wire = Wire()
    monkeypatch.setattr(chunked_products, "_wire", lambda group: wire)
    x, weight = (
        torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        for rows in (8, 5)
    )
    group = Group("tp", cast(Any, None), RANKS, 0, cast(Any, None))
    out = scattered_product(x, group, cast(Any, Matrices(wire, weight)), 3)
    gradient = torch.ones_like(out)
    wire.log.clear()
    (first,) = torch.autograd.grad(out, [x], gradient, retain_graph=True)
    assert "weights" not in wire.log
    again, of_weight = torch.autograd.grad(out, [x, weight], gradient)
    assert torch.equal(first, again)
    assert not of_weight.isnan().any()


def test_evaluation_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    monkeypatch.setattr(chunked_products, "_wire", lambda group: wire)
    group = Group("tp", cast(Any, None), RANKS, 0, cast(Any, None))
    x, weight = torch.ones(6, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    with torch.no_grad():
        for function in CHUNKED.values():
            found = function(x, group, cast(Any, Matrices(wire, weight)), 2)
            for one in [found] if isinstance(found, Tensor) else found:
                assert one.grad_fn is None
                assert not one.isnan().any()


def test_every_backend_s_gradients_are_known() -> None:
    for operator in (linear.OPERATOR, qkv_product.OPERATOR, gate_up_product.OPERATOR):
        names = {backend.name for backend in operator.backends}
        assert names == set(tensor_parallel_overlap._KNOWN_BACKENDS[operator.name])
