"""What a grade finds: each way of being wrong, with a backend that is wrong in that way alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine.ops.numerics import Grade, grade
from drivetrain.engine.ops.operator import Backend, Case, Operator, serves_all

ROWS = 512


def tripled(x: Tensor) -> Tensor:
    return x * 3


def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    return {"x": torch.randn(ROWS, 128, generator=generator).to(dtype).requires_grad_()}


CASE = Case("plain", make)


def graded(call: Callable[..., Any], dtype: torch.dtype = torch.bfloat16, **of_backend: Any) -> Grade:
    backends = (Backend("eager", tripled, serves_all), Backend("tried", call, serves_all, **of_backend))
    operator = Operator("tripled", "y = 3 x", "", tripled, lambda: [CASE], backends)
    return grade(operator, backends[1], CASE, dtype)


class _WritesItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(3)


class _LeavesARowUnwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found = torch.full_like(gradient, float("nan"))
        found[:-1] = gradient[:-1] * 3
        return found


def one_value_off(x: Tensor) -> Tensor:
    off = torch.zeros_like(x)
    off[7, 7] = 0.75
    return x * 3 + off


def drawn_anew(x: Tensor) -> Tensor:
    return x * 3 + torch.rand(()).to(x.dtype) * 1e-3


def test_the_reference_itself_and_errors_within_its_own_pass() -> None:
    assert graded(tripled).passed
    assert graded(lambda x: x * 3 * 1.002).passed  # of bf16's 1.7e-3 three times are allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_error_of_eight_times_the_dtypes_own_is_found_in_output_and_gradient(dtype: torch.dtype) -> None:
    own = {torch.bfloat16: 1.7e-3, torch.float16: 2.1e-4, torch.float32: 3e-7}[dtype]
    found = graded(lambda x: (x.double() * 3 * (1 + 8 * own)).to(x.dtype), dtype)
    assert len(found.problems) == 2
    assert found.problems[0].startswith("output 0: relative error")
    assert found.problems[1].startswith("gradient of x: relative error")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (one_value_off, "output 0: one value is 7"),
        (drawn_anew, "output 0 differs between two equal calls"),
        (_WritesItsGradient.apply, "it wrote into the gradient of output 0"),
        (_LeavesARowUnwritten.apply, "gradient of x has 128 values that are not finite"),
        (lambda x: x.detach() * 3, "x got no gradient"),
        (lambda x: x.float() * 3, "output 0 is torch.float32 (512, 128) on cpu"),
        (lambda x: (x * 3)[:-1], "output 0 is torch.bfloat16 (511, 128) on cpu"),
        (lambda x: (x * 3, x), "it has 2 outputs, the reference 1"),
    ],
)
def test_each_way_of_being_wrong_is_named(call: Callable[..., Any], said: str) -> None:
    found = graded(call)
    assert not found.passed
    assert any(problem.startswith(said) for problem in found.problems), found.problems


def test_a_backend_that_says_it_is_not_deterministic_may_differ() -> None:
    assert graded(drawn_anew, deterministic=False).passed


def test_a_backend_that_leaves_memory_unwritten_is_wrong_whatever_lies_there() -> None:
    def unwritten(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:-1] = x[:-1].detach() * 3
        return out + x * 0

    # Not-a-number where the allocator gives poisoned memory; zeros where the system has to give new pages.
    problems = graded(unwritten).problems
    said = ("output 0 has 128 values that are not finite", "output 0: relative error")
    assert any(problem.startswith(said) for problem in problems), problems


def test_what_the_allocator_hands_out_before_a_call_is_not_a_number() -> None:
    seen = []

    def looks(x: Tensor) -> Tensor:
        seen.extend(bool(torch.empty_like(x).isnan().any()) for _ in range(3))
        return x * 3

    small = Case("small", lambda dtype, generator: {"x": torch.randn(8, 128, generator=generator).to(dtype)})
    backend = Backend("looks", looks, serves_all)
    operator = Operator(
        "tripled", "", "", tripled, lambda: [small], (Backend("eager", tripled, serves_all), backend)
    )
    for _ in range(5):
        assert grade(operator, backend, small, torch.float32).passed
    # Some of it: which block comes first is the allocator's affair.
    assert any(seen)


def test_a_backend_that_refuses_is_not_called() -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError("it was called")

    backend = Backend("no", never, lambda _: "not today")
    operator = Operator(
        "tripled", "", "", tripled, lambda: [CASE], (Backend("eager", tripled, serves_all), backend)
    )
    found = grade(operator, backend, CASE, torch.float32)
    assert (found.refused, found.passed) == ("not today", False)
