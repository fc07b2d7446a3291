"""Matrix product with a weight: ``y = x weight^T + bias``."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.engine.ops._product_cases import linear_cases
from drivetrain.engine.ops._weight_gradient import transposing_pays, weight_gradient
from drivetrain.engine.ops.operator import Backend, Operator, serves_all
from drivetrain.engine.ops.signature import Signature
from drivetrain.errors import DrivetrainError

__all__ = ["OPERATOR", "linear", "linear_with_transposed_gradient"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The reference.

    Args:
        x: (..., K), floating point.
        weight: (N, K), of the same dtype.
        bias: (N,), of the same dtype.

    Returns:
        (..., N) in the dtype of x.

    Raises:
        DrivetrainError: shapes or dtypes do not fit.
    """
    _check(x, weight, bias)
    y = x @ weight.t()
    return y if bias is None else y + bias


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_with_transposed_gradient(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As :func:`linear`; backward copies an operand of the weight's gradient. Differentiable once."""
    _check(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise DrivetrainError(
            f"linear: x has the shape {tuple(x.shape)}, weight {tuple(weight.shape)}; they have to be "
            "(..., K) and (N, K)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise DrivetrainError(
            f"linear: bias has the shape {tuple(bias.shape)}; it has to be ({weight.shape[0]},)"
        )
    others = {one.dtype for one in (weight, bias) if one is not None} - {x.dtype}
    if others:
        raise DrivetrainError(f"linear: x is {x.dtype}, weight or bias {others.pop()}; convert one of them")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return F.linear(x, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        gradient_TN, x_TK = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        of_x = (gradient_TN @ weight_NK).view(x.shape) if ctx.needs_input_grad[0] else None
        of_weight = weight_gradient(gradient_TN, x_TK) if ctx.needs_input_grad[1] else None
        of_bias = gradient_TN.sum(0) if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias


def _transposed_refuses(signature: Signature) -> str | None:
    if signature.device != "cpu":
        return f"on {signature.device} the layout of the weight's gradient is the library's matter"
    slow = [dtype for dtype in signature.dtypes if not transposing_pays(dtype, signature.device)]
    if slow:
        name = str(slow[0]).removeprefix("torch.")
        return (
            f"in {name} the product of the weight's gradient is as fast as it is; it gains in bfloat16 alone"
        )
    return None


OPERATOR = Operator(
    name="linear",
    equation="y = x weight^T + bias",
    source="",
    reference=linear,
    cases=linear_cases,
    backends=(
        Backend("eager", _torch_linear, serves_all, ran_on=("cpu",), kernels=("aten::linear",)),
        Backend(
            "transposed_gradient",
            linear_with_transposed_gradient,
            _transposed_refuses,
            ran_on=("cpu",),
            kernels=("_LinearBackward",),
        ),
    ),
)
