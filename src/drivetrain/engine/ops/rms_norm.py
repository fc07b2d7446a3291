"""RMSNorm: ``y = x / sqrt(mean(x^2) + epsilon) * (weight + offset)``.

Zhang and Sennrich, arXiv:1910.07467. ``offset`` 1 and a weight that starts at 0 are Gemma's form. ``casting`` says
where the result is rounded to the dtype of x: ``after_weight`` once, ``before_weight`` as in the Llama code of
transformers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.engine.ops._compiled import inductor_refuses
from drivetrain.engine.ops._norm_cases import rms_norm_cases
from drivetrain.engine.ops._norm_formulas import (
    AFTER_WEIGHT,
    BEFORE_WEIGHT,
    check_norm,
    compiled_norm,
    wide_dtype,
)
from drivetrain.engine.ops._triton_norm_calls import NORM_KERNELS, triton_norm, triton_norm_refuses
from drivetrain.engine.ops.adapters import adapters_of
from drivetrain.engine.ops.operator import Backend, Operator, serves_all

__all__ = ["OPERATOR", "rms_norm", "torch_rms_norm"]


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float = 1e-6, offset: float = 0.0, casting: str = AFTER_WEIGHT
) -> Tensor:
    """The reference.

    Args:
        x: (..., D), floating point.
        weight: (D,), of any floating-point dtype.
        epsilon: added to the mean square.
        offset: added to the weight.
        casting: ``after_weight`` or ``before_weight``.

    Returns:
        (..., D) in the dtype of x; sums are at least fp32.

    Raises:
        DrivetrainError: the weight does not fit, or there is no such casting.
    """
    check_norm(x, weight, casting=casting)
    wide = wide_dtype(x)
    values = x.to(wide)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    if casting == BEFORE_WEIGHT:
        normed = normed.to(x.dtype).to(wide)
    return (normed * (weight.to(wide) + offset)).to(x.dtype)


def torch_rms_norm(
    x: Tensor, weight: Tensor, epsilon: float = 1e-6, offset: float = 0.0, casting: str = AFTER_WEIGHT
) -> Tensor:
    """Torch's own operator, in the dtype of x where the weight has it, else in the wider one."""
    check_norm(x, weight, casting=casting)
    if casting == BEFORE_WEIGHT:
        normed = F.rms_norm(x, weight.shape, None, epsilon)
        return (normed * (weight if offset == 0.0 else weight + offset)).to(x.dtype)
    # 1 + w in bf16 would round the weight away: it is added in the wider dtype.
    dtype = (
        x.dtype
        if weight.dtype == x.dtype and offset == 0.0
        else torch.promote_types(wide_dtype(x), weight.dtype)
    )
    scale = weight.to(dtype) if offset == 0.0 else weight.to(dtype) + offset
    return F.rms_norm(x.to(dtype), weight.shape, scale, epsilon).to(x.dtype)


def _inductor(
    x: Tensor, weight: Tensor, epsilon: float = 1e-6, offset: float = 0.0, casting: str = AFTER_WEIGHT
) -> Tensor:
    return compiled_norm(x, None, weight, None, epsilon, offset, casting, centred=False)[0]


def _triton(
    x: Tensor, weight: Tensor, epsilon: float = 1e-6, offset: float = 0.0, casting: str = AFTER_WEIGHT
) -> Tensor:
    return triton_norm(x, None, weight, None, epsilon, offset, casting, centred=False)[0]


OPERATOR = Operator(
    name="rms_norm",
    equation="y = x / sqrt(mean(x^2) + epsilon) * (weight + offset)",
    source="Zhang and Sennrich, arXiv:1910.07467",
    reference=rms_norm,
    cases=rms_norm_cases,
    backends=(
        Backend(
            "eager",
            torch_rms_norm,
            serves_all,
            ran_on=("cpu",),
            kernels=("aten::rms_norm", "aten::_fused_rms_norm"),
        ),
        Backend(
            "inductor",
            _inductor,
            inductor_refuses,
            ran_on=("cpu",),
            kernels=("_forward_formula", "_backward_formula"),
        ),
        Backend("triton", _triton, triton_norm_refuses, kernels=NORM_KERNELS),
        *adapters_of("rms_norm"),
    ),
    # benchmarks/operators.py on a CPU; on CUDA nothing was measured by us.
    untuned={"cpu": ("inductor",), "cuda": ("inductor",)},
)
