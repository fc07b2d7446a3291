"""Calls of operators over lists of tensors: their signatures, who serves them, what is refused."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adamw_examples import LISTS, drawn
from torch import Tensor

from drivetrain.engine.ops import adamw, gradient_clip
from drivetrain.engine.ops.discovery import operators
from drivetrain.engine.ops.numerics import grade
from drivetrain.engine.ops.operator import Case
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.ops.signature import signature_of
from drivetrain.errors import DrivetrainError

DOCS = Path(__file__).resolve().parents[3] / "docs" / "ops-optimizer.md"


def test_both_are_discovered() -> None:
    assert {"adamw", "gradient_clip"} <= {operator.name for operator in operators()}


def test_a_list_of_tensors_is_an_argument_for_each_of_them() -> None:
    given = {"gradients": [torch.zeros(2, 3), torch.zeros(3, 2).t()], "bounds": (1.0, 2.0), "none": ()}
    signature = signature_of("made_up", given)
    assert [name for name, _ in signature.arguments] == ["gradients[0]", "gradients[1]"]
    assert [one.shape for one in signature.members("gradients")] == [(2, 3), (2, 3)]
    assert [one.contiguous for one in signature.members("gradients")] == [True, False]
    assert signature.members("bounds") == ()
    assert signature.options == (("bounds", (1.0, 2.0)), ("none", ()))
    assert signature.argument("gradients") is None
    assert signature == signature_of("made_up", {**given, "gradients": tuple(given["gradients"])})
    assert signature != signature_of("made_up", {**given, "gradients": given["gradients"][::-1]})


def test_a_long_list_is_short_in_a_message() -> None:
    signature = signature_of(
        "made_up", {"a": [torch.zeros(2)] * 300, "b": torch.zeros(1), "c": [torch.zeros(3)]}
    )
    assert str(signature) == ("made_up(a[0]=float32[2] and 299 more, b=float32[1], c[0]=float32[3]) on cpu")


class _ForgetsTheSecond(torch.autograd.Function):
    """A product with a gradient for its first factor alone."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(second)
        return first * second

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (second,) = ctx.saved_tensors
        return gradient * second, torch.zeros_like(second)


def test_gradients_of_members_of_a_list_are_wanted_and_graded() -> None:
    def product(parts: Sequence[Tensor]) -> Tensor:
        return parts[0] * parts[1]

    def forgetting(parts: Sequence[Tensor]) -> Any:
        return _ForgetsTheSecond.apply(*parts)

    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        return {"parts": [torch.randn(5, generator=generator).to(dtype).requires_grad_() for _ in range(2)]}

    operator = replace(adamw.OPERATOR, name="product", reference=product, cases=lambda: [], untuned={})
    assert signature_of("product", make(torch.float32, torch.Generator())).requires_grad
    eager = operator.backend("eager")
    assert eager is not None
    right = grade(operator, replace(eager, call=product), Case("plain", make), torch.float32)
    assert right.passed
    assert [one.what for one in right.measured] == [
        "output 0",
        "gradient of parts[0]",
        "gradient of parts[1]",
    ]
    wrong = grade(operator, replace(eager, call=forgetting), Case("plain", make), torch.float32)
    assert [problem.split(":")[0] for problem in wrong.problems] == ["gradient of parts[1]"] * len(
        wrong.problems
    )
    assert wrong.problems


def test_another_step_and_rate_are_the_same_call() -> None:
    selection = Selection({"adamw": "auto", "gradient_clip": "auto"})
    for step in (1, 2, 3):
        given = drawn((4, 3), step=torch.tensor(step), learning_rate=torch.tensor(0.1 / step))
        selection.call(adamw.OPERATOR, **given)
    assert len(selection.choices) == 1
    assert selection.served == {("adamw", "fused"): 3}


def test_on_a_cpu_clipping_goes_by_rows_where_nothing_else_is_asked_for() -> None:
    selection = Selection({"adamw": "auto", "gradient_clip": "auto"})
    selection.call(gradient_clip.OPERATOR, gradients=(torch.ones(3),), max_norm=1.0)
    assert selection.served == {("gradient_clip", "rows"): 1}


def test_rows_are_refused_where_they_would_be_eager() -> None:
    rows = gradient_clip.OPERATOR.backend("rows")
    assert rows is not None
    elsewhere = replace(signature_of("gradient_clip", {"gradients": (torch.ones(3),)}), device="cuda")
    why = rows.supports(elsewhere)
    assert why is not None
    assert "would be eager" in why


def test_a_device_without_the_fused_kernel_is_refused_by_name() -> None:
    fused = adamw.OPERATOR.backend("fused")
    assert fused is not None
    why = fused.supports(replace(signature_of("adamw", drawn((2,))), device="npu"))
    assert why is not None
    assert "no fused AdamW for npu" in why


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradients": (torch.zeros(2),)}, r"there are 2 parameters and 1 gradients"),
        (
            {"gradients": (torch.zeros(2, 3), torch.zeros(4))},
            r"parameters\[1\] is \(5,\) and gradients\[1\] \(4,\)",
        ),
        (
            {"gradients": (torch.zeros(2, 3), torch.zeros(5).bfloat16())},
            r"gradients\[1\] torch.bfloat16.*one dtype",
        ),
        ({"gradients": (torch.zeros(2, 3).int(), torch.zeros(5).int())}, r"gradients\[0\] is torch.int32"),
        (dict.fromkeys(LISTS, ()), "parameters is empty"),
        ({"beta1": 1.0}, "beta1 is 1.0; it is to be at least 0 and below 1"),
        ({"beta2": -0.1}, "beta2 is -0.1"),
        ({"epsilon": math.nan}, "epsilon is nan"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"step": torch.tensor(0)}, "step is 0; the first update is number 1"),
        ({"step": torch.tensor(1.0)}, r"step is torch.float32 \(\); one integer"),
        ({"step": torch.tensor([1])}, r"step is torch.int64 \(1,\); one integer"),
        ({"learning_rate": torch.tensor(1)}, r"learning_rate is torch.int64 \(\)"),
    ],
)
@pytest.mark.parametrize("call", [adamw.adamw, *(one.call for one in adamw.OPERATOR.backends)])
def test_what_is_no_update_is_refused(
    call: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DrivetrainError, match=message):
        call(**{**drawn((2, 3), (5,)), **changes})


@pytest.mark.parametrize(
    ("gradients", "max_norm", "message"),
    [
        ((), 1.0, "gradients is empty"),
        ((torch.zeros(2), torch.zeros(2).half()), 1.0, r"gradients\[1\] torch.float16"),
        ((torch.zeros(2),), -1.0, "max_norm is -1.0; it is to be at least 0"),
        ((torch.zeros(2),), math.nan, "max_norm is nan"),
    ],
)
@pytest.mark.parametrize(
    "call", [gradient_clip.gradient_clip, *(one.call for one in gradient_clip.OPERATOR.backends)]
)
def test_what_cannot_be_clipped_is_refused(
    call: Callable[..., Any], gradients: Any, max_norm: float, message: str
) -> None:
    with pytest.raises(DrivetrainError, match=message):
        call(gradients=gradients, max_norm=max_norm)


def test_the_examples_of_the_document_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        # Of exec: a document of ours, in a namespace of its own.
        exec(compile(block, str(DOCS), "exec"), {})
