"""Every backend against float64, on every kind of mask: outputs and gradients."""

import pytest
import torch

from drivetrain.engine.ops.attention import CAUSAL, OPERATOR, Mask
from drivetrain.engine.ops.attention.cases import KINDS
from drivetrain.engine.ops.attention.docs import RULES, crosses_of
from drivetrain.engine.ops.numerics import Upstream, grade
from drivetrain.engine.ops.operator import Case

CASES = {case.name: case for case in OPERATOR.cases()}
ON_CPU = ("eager", "dense", "chunked")
"""Those that run here forward and backward; ``dense`` is the reference itself."""


def _grid(*backends: str) -> list[tuple[str, str]]:
    """Pairs of a backend and a case, without those that the backend refuses for its mask."""
    return [
        (backend, name)
        for backend in backends
        for name in CASES
        if name not in KINDS or RULES[backend](KINDS[name], crosses_of(KINDS[name])) is None
    ]


def _check(backend_name: str, case: Case, dtype: torch.dtype, upstream: Upstream = "dense") -> None:
    backend = OPERATOR.backend(backend_name)
    assert backend is not None
    found = grade(OPERATOR, backend, case, dtype, upstream=upstream)
    assert found.passed, found.refused or found.problems
    wanted = "v" if case.name in ("one token", "window of one") else "qkv"
    assert {one.what for one in found.measured} == {"output 0", *(f"gradient of {name}" for name in wanted)}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize(("backend", "name"), _grid("eager", "chunked"))
def test_errors_are_within_five_times_those_of_the_dense_softmax(
    backend: str, name: str, dtype: torch.dtype
) -> None:
    _check(backend, CASES[name], dtype)


@pytest.mark.parametrize("upstream", ["expanded", "transposed"])
@pytest.mark.parametrize("name", ["causal", "window + documents", "alibi", "3 heads, 1 groups"])
@pytest.mark.parametrize("backend", ["eager", "chunked"])
def test_incoming_gradients_may_have_any_strides(backend: str, name: str, upstream: Upstream) -> None:
    _check(backend, CASES[name], torch.float32, upstream)


@pytest.mark.long
@pytest.mark.parametrize("upstream", ["expanded", "transposed"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize(("backend", "name"), _grid(*ON_CPU))
def test_the_whole_grid_under_every_layout_of_gradients(
    backend: str, name: str, dtype: torch.dtype, upstream: Upstream
) -> None:
    _check(backend, CASES[name], dtype, upstream)


def _without_gradients(case: Case) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, object]:
        return {
            name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in case.make(dtype, generator).items()
        }

    return Case(case.name, make)


@pytest.mark.parametrize("name", ["prefix + documents", "a tail of no document"])
def test_flex_attention_computes_the_same_forward(name: str) -> None:
    _check_forward(name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for _, name in _grid("flex") if name in KINDS or "tail" in name])
def test_flex_attention_computes_every_kind_of_mask_forward(name: str) -> None:
    _check_forward(name)


def _check_forward(name: str) -> None:
    flex = OPERATOR.backend("flex")
    assert flex is not None
    found = grade(OPERATOR, flex, _without_gradients(CASES[name]), torch.float32)
    assert found.passed, found.refused or found.problems
    assert len(found.measured) == 1


def test_float64_is_computed_in_float64() -> None:
    """What the others are held against is not itself rounded on the way."""
    for name in ("alibi + documents", "soft-cap", "dropout, seeded", "cross lengths, bottom right"):
        given = CASES[name].make(torch.float64, torch.Generator().manual_seed(0))
        exact = OPERATOR.reference(**given)
        chunked = OPERATOR.backend("chunked")
        assert chunked is not None
        torch.testing.assert_close(chunked.call(**given), exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("mask", [Mask(window=1), CAUSAL], ids=str)
@pytest.mark.parametrize("backend", ON_CPU)
def test_gradients_that_cancel_cancel_up_to_the_rounding_of_their_terms(
    backend: str, mask: Mask, dtype: torch.dtype
) -> None:
    """Of a query that sees one key, and of that key where no other query sees it."""
    tokens = 50 if mask.window else 1
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (
        torch.randn(tokens, 2, 16, generator=generator).to(dtype).requires_grad_() for _ in range(4)
    )
    found = OPERATOR.backend(backend)
    assert found is not None
    out = found.call(q, k, v, mask)
    of_q, of_k, _ = torch.autograd.grad(out, (q, k, v), upstream.detach())
    # What cancels: sums over features of upstream times value, times the scale, times a key or query.
    terms = 16 * upstream.abs().max() * v.abs().max() * 0.25 * max(q.abs().max(), k.abs().max())
    assert max(of_q.abs().max(), of_k.abs().max()) <= torch.finfo(dtype).eps * terms
