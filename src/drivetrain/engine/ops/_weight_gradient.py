"""The product of a weight's gradient, ``gradient.T @ x``, in the layout in which the device is fast.

In bf16 on a CPU oneDNN multiplies two operands that both lie row by row at twice the speed of one that is read across
its rows, which is what a transposed view asks for. Copying one operand first costs less than that.
"""

import torch
from torch import Tensor

__all__ = ["transposing_pays", "weight_gradient"]


def transposing_pays(dtype: torch.dtype, device: str) -> bool:
    """Whether :func:`weight_gradient` copies an operand."""
    return dtype == torch.bfloat16 and device == "cpu"


def weight_gradient(gradient_TN: Tensor, x_TK: Tensor) -> Tensor:
    """(N, K), ``gradient.T @ x``; the narrower operand is copied where that pays.

    Its strides may be those of a transposed (K, N).
    """
    if not transposing_pays(gradient_TN.dtype, gradient_TN.device.type):
        return gradient_TN.t() @ x_TK
    if gradient_TN.shape[1] <= x_TK.shape[1]:
        return gradient_TN.t().contiguous() @ x_TK
    return (x_TK.t().contiguous() @ gradient_TN).t()
