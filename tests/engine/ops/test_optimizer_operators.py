"""AdamW and gradient clipping as operators: their grids, what the grids find, and what training has of them."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from adamw_examples import LISTS, drawn
from interpreter import run_interpreted
from torch import nn

from drivetrain.engine.ops import adamw, gradient_clip
from drivetrain.engine.ops.discovery import operator_named
from drivetrain.engine.ops.numerics import grade
from drivetrain.engine.ops.operator import Case, Operator
from drivetrain.engine.optimizer import clip_gradients

pytestmark = [
    # Torch's own, when Inductor is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # Dynamo looks at every tensor that it meets, and hides this one warning itself, unless warnings are errors.
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"
    ),
]

HERE = Path(__file__).parent
PLAIN = (
    ("adamw", "eager"),
    ("adamw", "foreach"),
    ("adamw", "fused"),
    ("gradient_clip", "eager"),
    ("gradient_clip", "rows"),
)


def problems_of(operator: Operator, backend: str, cases: Iterable[Case], *dtypes: torch.dtype) -> list[str]:
    """Of all cases in these dtypes, by default in all of a case's, each with its name."""
    served_by = operator.backend(backend)
    assert served_by is not None
    found = []
    for case in cases:
        for dtype in dtypes or case.dtypes:
            graded = grade(operator, served_by, case, dtype)
            assert graded.refused is None, f"{case.name}: {graded.refused}"
            assert graded.measured or graded.problems
            found += [f"{case.name}, {dtype}: {problem}" for problem in graded.problems]
    return found


def case_of(name: str, case_name: str) -> Case:
    return next(case for case in operator_named(name).cases() if case.name == case_name)


# -- the grid --


@pytest.mark.parametrize(("name", "backend"), PLAIN)
def test_torchs_own_forms_are_as_near_to_float64_as_the_reference(name: str, backend: str) -> None:
    operator = operator_named(name)
    assert problems_of(operator, backend, operator.cases()) == []


def test_compiled_code_is_as_near_to_float64_as_the_reference() -> None:
    cases = [case_of("adamw", "many elements")]
    assert problems_of(operator_named("adamw"), "inductor", cases, torch.float32) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw", "gradient_clip"])
def test_compiled_code_passes_every_sixth_case_in_one_dtype(name: str) -> None:
    operator = operator_named(name)
    assert len(operator.cases()) > 12
    found = []
    for number, case in enumerate(operator.cases()[::6]):
        found += problems_of(operator, "inductor", [case], case.dtypes[number % len(case.dtypes)])
    assert found == []


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["adamw", "gradient_clip"])
def test_compiled_code_passes_every_case_in_one_dtype(name: str) -> None:
    operator = operator_named(name)
    found = []
    for number, case in enumerate(operator.cases()):
        found += problems_of(operator, "inductor", [case], case.dtypes[number % len(case.dtypes)])
    assert found == []


def interpreted(calls: Sequence[tuple[str, str, str, str]]) -> list[str]:
    found = run_interpreted(HERE / "interpreted_grid.py", json.dumps(calls), timeout_s=1700.0)
    assert len(found) == len(calls)
    problems = []
    for call, one in zip(calls, found, strict=True):
        assert one["refused"] is None, f"{call}: {one['refused']}"
        assert one["measured"] or one["problems"]
        problems += [f"{' '.join(call)}: {problem}" for problem in one["problems"]]
    return problems


def test_triton_kernels_are_as_near_to_float64_as_the_reference() -> None:
    calls = [
        ("adamw", "odd sizes", "float32", "dense"),
        ("adamw", "the first update of a long memory", "float32", "dense"),
        ("adamw", "parameters in fp32", "bfloat16", "dense"),
        ("adamw", "large epsilon", "float32", "dense"),
        ("gradient_clip", "above the bound", "bfloat16", "dense"),
        ("gradient_clip", "whole rows", "float32", "dense"),
    ]
    assert interpreted(calls) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["adamw", "gradient_clip"])
def test_triton_kernels_pass_the_whole_grid(name: str) -> None:
    calls = [
        (name, case.name, str(dtype).removeprefix("torch."), "dense")
        for case in operator_named(name).cases()
        for dtype in case.dtypes
    ]
    assert interpreted(calls) == []


@pytest.mark.long
def test_triton_kernels_behave_in_the_interpreter() -> None:
    found = run_interpreted(HERE / "interpreted_optimizer.py")
    assert found["failed"] == {}
    assert len(found["made"]) == 4


# -- the references --


def test_fifty_updates_of_one_number_are_those_of_plain_arithmetic() -> None:
    rate, beta1, beta2, epsilon, decay = 0.02, 0.8, 0.99, 1e-3, 0.3
    parameter, mean, square = 1.5, 0.0, 0.0
    tensors = tuple(torch.tensor([one], dtype=torch.float64) for one in (parameter, mean, square))
    for step in range(1, 51):
        gradient = math.sin(7.0 * step)
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        parameter -= rate * decay * parameter
        unbiased = mean / (1 - beta1**step), square / (1 - beta2**step)
        parameter -= rate * unbiased[0] / (math.sqrt(unbiased[1]) + epsilon)
        tensors = adamw.adamw(
            (tensors[0],),
            (torch.tensor([gradient], dtype=torch.float64),),
            (tensors[1],),
            (tensors[2],),
            torch.tensor(step),
            torch.tensor(rate, dtype=torch.float64),
            beta1,
            beta2,
            epsilon,
            decay,
        )
    assert [one.item() for one in tensors] == pytest.approx([parameter, mean, square], rel=1e-12)


@pytest.mark.parametrize("step", [1, 2, 1000, 10**9])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.99999])
def test_bias_corrections_are_right_to_the_last_digit_in_fp32(beta: float, step: int) -> None:
    exact = -math.expm1(step * math.log(beta)) if beta else 1.0
    found = adamw.bias_correction(beta, torch.tensor(step), torch.float32)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(exact, rel=2e-7)


def test_the_reference_of_clipping_gives_norm_factor_and_scaled_gradients() -> None:
    first, second, norm, factor = gradient_clip.gradient_clip(
        (torch.tensor([3.0]), torch.tensor([[0.0], [4.0]])), 1.0
    )
    assert (norm.item(), factor.item()) == (5.0, pytest.approx(0.2, rel=1e-6))
    assert first.tolist() == pytest.approx([0.6], rel=1e-6)
    assert second.tolist() == [[0.0], [pytest.approx(0.8, rel=1e-6)]]


# -- what training has of them --


@pytest.mark.parametrize("form", ["eager", "foreach", "fused"])
def test_backends_of_torch_give_the_bits_of_its_optimizer(form: str) -> None:
    given = drawn((4, 3), (5,), beta1=0.8, beta2=0.9, epsilon=1e-6, weight_decay=0.2)
    parameters = [nn.Parameter(one.clone()) for one in given["parameters"]]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=0.1,
        betas=(0.8, 0.9),
        eps=1e-6,
        weight_decay=0.2,
        foreach=form == "foreach",
        fused=form == "fused",
    )
    for parameter, gradient, first, second in zip(
        parameters, *(given[name] for name in LISTS[1:]), strict=True
    ):
        parameter.grad = gradient
        optimizer.state[parameter] = {
            "step": torch.tensor(2.0),
            "exp_avg": first.clone(),
            "exp_avg_sq": second.clone(),
        }
    optimizer.step()
    backend = adamw.OPERATOR.backend(form)
    assert backend is not None
    found = backend.call(**given)
    wanted = [
        *parameters,
        *(optimizer.state[one]["exp_avg"] for one in parameters),
        *(optimizer.state[one]["exp_avg_sq"] for one in parameters),
    ]
    assert len(found) == 6
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_clipping_by_rows_gives_the_bits_of_a_training_step() -> None:
    gradients = tuple(torch.randn(shape) for shape in ((5000,), (3, 7), (2, 2048)))
    parameters = [nn.Parameter(torch.zeros(one.shape)) for one in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm, factor = clip_gradients(parameters, 0.5)
    rows = gradient_clip.OPERATOR.backend("rows")
    assert rows is not None
    *clipped, found_norm, found_factor = rows.call(gradients=gradients, max_norm=0.5)
    assert (found_norm.item(), found_factor.item()) == (norm.item(), factor.item())
    assert factor.item() < 1
    for parameter, one in zip(parameters, clipped, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, one)


@pytest.mark.parametrize("backend", ["eager", "foreach", "fused"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_touches_its_own_element_alone(bad: float, backend: str) -> None:
    given = drawn((4, 3), (2,))
    served_by = adamw.OPERATOR.backend(backend)
    assert served_by is not None
    clean = served_by.call(**given)
    given["gradients"][0][2, 1] = bad
    found = served_by.call(**given)
    for number in (0, 2, 4):
        changed, before = found[number].clone(), clean[number]
        assert not changed[2, 1].isfinite()
        changed[2, 1] = before[2, 1]
        assert torch.equal(changed, before)
        assert torch.equal(found[number + 1], clean[number + 1])


@pytest.mark.parametrize("backend", ["eager", "rows"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_not_scaled(bad: float, backend: str) -> None:
    served_by = gradient_clip.OPERATOR.backend(backend)
    assert served_by is not None
    gradients = (torch.full((5000,), 3.0), torch.tensor([bad, 4.0]))
    *clipped, norm, factor = served_by.call(gradients=gradients, max_norm=1.0)
    assert not norm.isfinite()
    assert factor.item() == 1.0
    assert torch.equal(clipped[0], gradients[0])
    assert clipped[1][1].item() == 4.0


@pytest.mark.parametrize("backend", ["eager", "rows"])
def test_the_norm_of_16_bit_gradients_has_the_digits_of_fp32(backend: str) -> None:
    served_by = gradient_clip.OPERATOR.backend(backend)
    assert served_by is not None
    gradients = tuple(torch.randn(shape).bfloat16() for shape in ((5000,), (3, 7)))
    exact = math.sqrt(sum(one.double().square().sum().item() for one in gradients))
    *_, norm, factor = served_by.call(gradients=gradients, max_norm=1.0)
    assert norm.dtype == factor.dtype == torch.float32
    assert norm.item() == pytest.approx(exact, rel=3e-7)
    assert factor.item() == pytest.approx(1 / (exact + 1e-6), rel=3e-7)
