"""Residual and LayerNorm in one: ``s = x + residual; y = (s - mean(s)) / sqrt(variance(s) + epsilon) * weight + bias``.

Both are returned, as by ``add_rms_norm``. On a CPU torch's own operators are faster than compiled code.
"""

from torch import Tensor

from drivetrain.engine.ops._compiled import inductor_refuses
from drivetrain.engine.ops._norm_cases import add_layer_norm_cases
from drivetrain.engine.ops._norm_formulas import check_norm, compiled_norm
from drivetrain.engine.ops._triton_norm_calls import NORM_KERNELS, triton_norm, triton_norm_refuses
from drivetrain.engine.ops.adapters import adapters_of
from drivetrain.engine.ops.layer_norm import LAYER_NORM_FLOOR, layer_norm, torch_layer_norm
from drivetrain.engine.ops.operator import Backend, Operator, serves_all

__all__ = ["OPERATOR", "add_layer_norm"]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """The reference.

    Args:
        x, residual: (..., D), floating point; the residual may be wider than x.
        weight, bias: (D,), of any floating-point dtype.
        epsilon: added to the variance.

    Returns:
        The norm, (..., D) in the dtype of x, and the sum in the wider dtype of both.

    Raises:
        DrivetrainError: residual, weight or bias do not fit.
    """
    check_norm(x, weight, bias, residual=residual)
    total = x + residual
    return layer_norm(total, weight, bias, epsilon).to(x.dtype), total


def _eager(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor]:
    check_norm(x, weight, bias, residual=residual)
    total = x + residual
    return torch_layer_norm(total, weight, bias, epsilon).to(x.dtype), total


def _inductor(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5
) -> tuple[Tensor, ...]:
    return compiled_norm(x, residual, weight, bias, epsilon, centred=True)


def _triton(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5
) -> tuple[Tensor, ...]:
    return triton_norm(x, residual, weight, bias, epsilon, centred=True)


OPERATOR = Operator(
    name="add_layer_norm",
    equation="s = x + residual; y = (s - mean(s)) / sqrt(variance(s) + epsilon) * weight + bias",
    source="Ba, Kiros and Hinton, arXiv:1607.06450",
    reference=add_layer_norm,
    cases=add_layer_norm_cases,
    backends=(
        Backend("eager", _eager, serves_all, ran_on=("cpu",), kernels=("aten::native_layer_norm",)),
        Backend(
            "inductor",
            _inductor,
            inductor_refuses,
            ran_on=("cpu",),
            kernels=("_forward_formula", "_backward_formula"),
        ),
        Backend("triton", _triton, triton_norm_refuses, kernels=NORM_KERNELS),
        *adapters_of("add_layer_norm"),
    ),
    floor=LAYER_NORM_FLOOR,
)
