"""Backends of other libraries over the numerics grids, with stand-ins for the libraries.

The stand-ins take what the libraries document and compute it in plain torch, so what is graded is the mapping: a
swapped half, a missing copy, a lost argument. Nothing here says that a library was run.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from stand_in_flash_attn import stand_in_for_flash_attn
from stand_in_liger import stand_in_for_liger
from stand_in_torch_npu import stand_in_for_torch_npu
from stand_in_transformer_engine import stand_in_for_transformer_engine
from torch import Tensor

from drivetrain.engine.ops.adapters import flash_attn_ops, liger, npu, transformer_engine
from drivetrain.engine.ops.discovery import operator_named, operators
from drivetrain.engine.ops.numerics import Upstream, grade
from drivetrain.engine.ops.operator import Backend, Case, Operator
from drivetrain.engine.ops.signature import signature_of

ADAPTERS: dict[str, tuple[ModuleType, Callable[[pytest.MonkeyPatch], None]]] = {
    "liger": (liger, stand_in_for_liger),
    "flash_attn": (flash_attn_ops, stand_in_for_flash_attn),
    "transformer_engine": (transformer_engine, stand_in_for_transformer_engine),
    "npu": (npu, stand_in_for_torch_npu),
}
SERVED = [(library, name) for library, (module, _) in ADAPTERS.items() for name in module.RULES]
LAYOUTS: tuple[Upstream, ...] = ("dense", "expanded", "transposed")


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=SERVED, ids=lambda pair: " ".join(pair))
def mapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Operator, Backend]:
    """An operator and its backend of a library, which stands there, on whatever device."""
    library, name = request.param
    module, stand_in = ADAPTERS[library]
    stand_in(monkeypatch)
    operator = operator_named(name)
    backend = operator.backend(library)
    assert backend is not None
    return operator, replace(backend, supports=module.RULES[name])


def found_in(
    mapped: tuple[Operator, Backend], case: Case, dtype: torch.dtype, upstream: Upstream
) -> tuple[int, list[str]]:
    """Calls that were served, and what is wrong with them."""
    graded = grade(*mapped, case, dtype, upstream=upstream)
    assert graded.measured or graded.problems or graded.refused
    return graded.refused is None, [f"{case.name}, {dtype}: {problem}" for problem in graded.problems]


def test_a_mapping_is_as_near_to_float64_as_the_reference(mapped: tuple[Operator, Backend]) -> None:
    problems, served = [], 0
    for number, case in enumerate(mapped[0].cases()):
        # All cases in one dtype each, in turn, and gradients of one layout each: all pairs are in the long test.
        calls, wrong = found_in(mapped, case, DTYPES[number % 3], LAYOUTS[number // 3 % 3])
        served += calls
        problems += wrong
    assert problems == []
    # Of the losses on an Ascend device those of few words are refused; a test of their own has more.
    assert served > 0 or (mapped[0].name, mapped[1].name) == ("linear_cross_entropy", "npu")


@pytest.mark.long
@pytest.mark.parametrize("upstream", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mapping_passes_the_whole_grid(
    mapped: tuple[Operator, Backend], dtype: torch.dtype, upstream: Upstream
) -> None:
    assert [found_in(mapped, case, dtype, upstream)[1] for case in mapped[0].cases()] == [
        [] for _ in mapped[0].cases()
    ]


LOSSES = [pair for pair in SERVED if pair[1] == "linear_cross_entropy"]


def many_words(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    weighted: bool = False,
    ignored: float = 0.3,
    z_loss: float = 0.0,
) -> dict[str, Any]:
    """A loss of as many words as Ascend's needs, and of as many rows at once as a library likes."""
    labels = torch.randint(300, (17,), generator=generator)
    labels[torch.rand(17, generator=generator) < ignored] = -100
    given: dict[str, Any] = {
        "hidden": torch.randn(17, 24, generator=generator).to(dtype).requires_grad_(),
        "weight": (torch.randn(300, 24, generator=generator) / 5).to(dtype).requires_grad_(),
        "labels": labels,
    }
    if weighted:
        nothing = labels % 3 == 0
        given["token_weights"] = torch.rand(17, generator=generator).masked_fill(nothing, 0.0)
        # What weighs nothing may have any label.
        labels[nothing] = 10_000
    return {**given, "z_loss": z_loss} if z_loss else given


@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("z_loss", [0.0, 0.05])
@pytest.mark.parametrize("mapped", LOSSES, indirect=True, ids=" ".join)
def test_losses_count_what_is_counted(
    mapped: tuple[Operator, Backend], weighted: bool, ignored: float, z_loss: float
) -> None:
    make = functools.partial(many_words, weighted=weighted, ignored=ignored, z_loss=z_loss)
    for dtype, layout in zip(DTYPES, LAYOUTS, strict=True):
        served, problems = found_in(mapped, Case("many words", make), dtype, layout)
        assert problems == []
        if mapped[1].name in ("liger", "flash_attn"):
            assert served
        else:
            refused = {"npu": torch.float32, "transformer_engine": torch.float16}[mapped[1].name]
            assert bool(served) == (z_loss == 0.0 and dtype != refused)


@pytest.mark.parametrize("mapped", LOSSES, indirect=True, ids=" ".join)
def test_what_an_ignored_token_holds_is_not_looked_at(mapped: tuple[Operator, Backend]) -> None:
    _, backend = mapped
    given = many_words(torch.bfloat16, torch.Generator().manual_seed(0), weighted=False, ignored=0.3)
    hidden, weight, labels = given["hidden"], given["weight"], given["labels"]
    with torch.no_grad():
        hidden[labels == -100] = float("nan")
    total, count = backend.call(hidden, weight, labels)
    assert count == (labels != -100).sum()
    assert total.isfinite()
    for gradient in torch.autograd.grad(total, (hidden, weight)):
        assert gradient.isfinite().all()
        assert gradient.any()


def test_a_second_backward_gives_its_own_gradients(mapped: tuple[Operator, Backend]) -> None:
    operator, backend = mapped
    case = next(
        case
        for case in operator.cases()
        if backend.supports(signature_of(operator.name, case.make(torch.bfloat16, torch.Generator()))) is None
    )
    given = case.make(torch.bfloat16, torch.Generator().manual_seed(3))
    outputs = backend.call(**given)
    outputs = [one for one in ((outputs,) if isinstance(outputs, Tensor) else outputs) if one.requires_grad]
    leaves = [one for one in given.values() if isinstance(one, Tensor) and one.requires_grad]
    upstream = [
        torch.randn(one.shape, generator=torch.Generator().manual_seed(1)).to(one.dtype) for one in outputs
    ]
    first = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    doubled = torch.autograd.grad(outputs, leaves, [2 * one for one in upstream], retain_graph=True)
    again = torch.autograd.grad(outputs, leaves, upstream)
    for one, two, other in zip(first, doubled, again, strict=True):
        torch.testing.assert_close(two, 2 * one, rtol=0.02, atol=0.02)
        assert torch.equal(one, other)


def test_one_gradient_alone_is_computed_right(mapped: tuple[Operator, Backend]) -> None:
    """Liger's loss makes none for the weight where the hidden states want none."""
    operator, backend = mapped
    case = next(
        case
        for case in operator.cases()
        if backend.supports(signature_of(operator.name, case.make(torch.bfloat16, torch.Generator()))) is None
    )
    names = [
        name
        for name, one in case.make(torch.bfloat16, torch.Generator()).items()
        if isinstance(one, Tensor) and one.requires_grad
    ]
    for wanted in names:

        def make(dtype: torch.dtype, generator: torch.Generator, wanted: str = wanted) -> dict[str, Any]:
            given = case.make(dtype, generator)
            return {
                name: one.detach().requires_grad_(name == wanted)
                if isinstance(one, Tensor) and one.is_floating_point()
                else one
                for name, one in given.items()
            }

        found = grade(operator, backend, Case(f"{case.name}, {wanted} alone", make), torch.bfloat16)
        assert found.passed, (wanted, found.refused, found.problems)
        assert f"gradient of {wanted}" in [one.what for one in found.measured]


@pytest.mark.parametrize(
    "mapped", [pair for pair in SERVED if pair[1] == "grouped_product"], indirect=True, ids=" ".join
)
def test_rows_that_nobody_has_are_not_looked_at_coming_or_going(mapped: tuple[Operator, Backend]) -> None:
    operator, backend = mapped
    case = next(case for case in operator.cases() if case.name == "rows past the last expert")
    given = case.make(torch.bfloat16, torch.Generator().manual_seed(0))
    last = int(given["ends"][-1])
    with torch.no_grad():
        given["x"][last:] = float("nan")
    out = backend.call(**given)
    assert isinstance(out, Tensor)
    assert not out[last:].any()
    incoming = torch.ones_like(out)
    incoming[last:] = float("nan")
    of_x, of_weight = torch.autograd.grad(out, (given["x"], given["weight"]), incoming)
    assert not of_x[last:].any()
    assert of_x[:last].any()
    assert of_weight.isfinite().all()


def test_none_is_said_to_have_run() -> None:
    for operator in operators():
        for backend in operator.backends:
            if backend.name in ADAPTERS:
                assert backend.ran_on == ()
                assert backend.library
