"""Residual and RMSNorm in one: ``s = x + residual; y = s / sqrt(mean(s^2) + epsilon) * (weight + offset)``.

Both are returned, the norm for the next layer and the sum as its residual. The gradient of the sum is what comes in for
it plus what comes through the norm, in this order of the chain rule: first through the norm, then added.
"""

from torch import Tensor

from drivetrain.engine.ops._compiled import inductor_refuses
from drivetrain.engine.ops._norm_cases import add_rms_norm_cases
from drivetrain.engine.ops._norm_formulas import AFTER_WEIGHT, check_norm, compiled_norm
from drivetrain.engine.ops._triton_norm_calls import NORM_KERNELS, triton_norm, triton_norm_refuses
from drivetrain.engine.ops.adapters import adapters_of
from drivetrain.engine.ops.operator import Backend, Operator, serves_all
from drivetrain.engine.ops.rms_norm import rms_norm, torch_rms_norm

__all__ = ["OPERATOR", "add_rms_norm"]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    casting: str = AFTER_WEIGHT,
) -> tuple[Tensor, Tensor]:
    """The reference.

    Args:
        x, residual: (..., D), floating point; the residual may be wider than x.
        weight: (D,), of any floating-point dtype.
        epsilon, offset, casting: as of ``rms_norm``.

    Returns:
        The norm, (..., D) in the dtype of x, and the sum in the wider dtype of both.

    Raises:
        DrivetrainError: residual or weight do not fit, or there is no such casting.
    """
    check_norm(x, weight, residual=residual, casting=casting)
    total = x + residual
    return rms_norm(total, weight, epsilon, offset, casting).to(x.dtype), total


def _eager(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    casting: str = AFTER_WEIGHT,
) -> tuple[Tensor, Tensor]:
    check_norm(x, weight, residual=residual, casting=casting)
    total = x + residual
    return torch_rms_norm(total, weight, epsilon, offset, casting).to(x.dtype), total


def _inductor(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    casting: str = AFTER_WEIGHT,
) -> tuple[Tensor, ...]:
    return compiled_norm(x, residual, weight, None, epsilon, offset, casting, centred=False)


def _triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    casting: str = AFTER_WEIGHT,
) -> tuple[Tensor, ...]:
    return triton_norm(x, residual, weight, None, epsilon, offset, casting, centred=False)


OPERATOR = Operator(
    name="add_rms_norm",
    equation="s = x + residual; y = s / sqrt(mean(s^2) + epsilon) * (weight + offset)",
    source="Zhang and Sennrich, arXiv:1910.07467",
    reference=add_rms_norm,
    cases=add_rms_norm_cases,
    backends=(
        Backend(
            "eager", _eager, serves_all, ran_on=("cpu",), kernels=("aten::rms_norm", "aten::_fused_rms_norm")
        ),
        Backend(
            "inductor",
            _inductor,
            inductor_refuses,
            ran_on=("cpu",),
            kernels=("_forward_formula", "_backward_formula"),
        ),
        Backend("triton", _triton, triton_norm_refuses, kernels=NORM_KERNELS),
        *adapters_of("add_rms_norm"),
    ),
    # benchmarks/operators.py on a CPU; on CUDA nothing was measured by us.
    untuned={"cpu": ("inductor",), "cuda": ("inductor",)},
)
