"""LayerNorm: ``y = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias``.

Ba, Kiros and Hinton, arXiv:1607.06450; the variance divides by the number of features. On a CPU torch's own operator is
faster than compiled code.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.engine.ops._compiled import inductor_refuses
from drivetrain.engine.ops._norm_cases import layer_norm_cases
from drivetrain.engine.ops._norm_formulas import check_norm, compiled_norm, wide_dtype
from drivetrain.engine.ops._triton_norm_calls import NORM_KERNELS, triton_norm, triton_norm_refuses
from drivetrain.engine.ops.adapters import adapters_of
from drivetrain.engine.ops.operator import FLOOR, Backend, Operator, serves_all

__all__ = ["LAYER_NORM_FLOOR", "OPERATOR", "layer_norm", "torch_layer_norm"]

LAYER_NORM_FLOOR = {**FLOOR, torch.float32: 2e-5}
"""Torch's own operator sums the gradients of weight and bias row after row: 3e-6 in fp32 after 16,384 rows, and
1.1e-5 after 1,000 rows of equal numbers."""


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    """The reference.

    Args:
        x: (..., D), floating point.
        weight, bias: (D,), of any floating-point dtype.
        epsilon: added to the variance.

    Returns:
        (..., D) in the dtype of x; sums are at least fp32.

    Raises:
        DrivetrainError: weight or bias do not fit.
    """
    check_norm(x, weight, bias)
    wide = wide_dtype(x)
    values = x.to(wide)
    values = values - values.mean(-1, keepdim=True)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    out = normed * weight.to(wide)
    if bias is not None:
        out = out + bias.to(wide)
    return out.to(x.dtype)


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    """Torch's own operator, in the dtype of x where weight and bias have it, else in the wider one.

    On a CPU its gradients of weight and bias are summed in the dtype of x, row after row: in bf16 they are off by 7% of
    their size after 4,096 rows and by 13% after 16,384, whatever the dtype of the weight (torch 2.13). There it
    computes in fp32: 14 ms instead of 9 for 4,096 rows of 2,048 features, forward and backward.
    """
    check_norm(x, weight, bias)
    dtype = x.dtype
    sums_in_16_bits = x.device.type == "cpu" and x.dtype != wide_dtype(x)
    if sums_in_16_bits or weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        dtype = torch.promote_types(wide_dtype(x), weight.dtype)
    shift = None if bias is None else bias.to(dtype)
    return F.layer_norm(x.to(dtype), weight.shape, weight.to(dtype), shift, epsilon).to(x.dtype)


def _inductor(x: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    return compiled_norm(x, None, weight, bias, epsilon, centred=True)[0]


def _triton(x: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    return triton_norm(x, None, weight, bias, epsilon, centred=True)[0]


OPERATOR = Operator(
    name="layer_norm",
    equation="y = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias",
    source="Ba, Kiros and Hinton, arXiv:1607.06450",
    reference=layer_norm,
    cases=layer_norm_cases,
    backends=(
        Backend("eager", torch_layer_norm, serves_all, ran_on=("cpu",), kernels=("aten::native_layer_norm",)),
        Backend(
            "inductor",
            _inductor,
            inductor_refuses,
            ran_on=("cpu",),
            kernels=("_forward_formula", "_backward_formula"),
        ),
        Backend("triton", _triton, triton_norm_refuses, kernels=NORM_KERNELS),
        *adapters_of("layer_norm"),
    ),
    floor=LAYER_NORM_FLOOR,
)
