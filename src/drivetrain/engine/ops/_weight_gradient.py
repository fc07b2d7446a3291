"""The product of a weight's gradient, ``gradient.T @ x``, in the layout in which the device is fast.

In bf16 on a CPU with AMX oneDNN multiplies two operands that both lie row by row at twice the speed of one that is read
across its rows, which is what a transposed view asks for. Copying one operand first costs less than that. Without AMX
both ways take the same.
"""

import torch
from torch import Tensor

__all__ = ["transposing_pays", "weight_gradient"]


def transposing_pays(dtype: torch.dtype, device: str) -> bool:
    """Whether :func:`weight_gradient` copies an operand."""
    return dtype == torch.bfloat16 and device == "cpu"


def weight_gradient(gradient_TN: Tensor, x_TK: Tensor, out_NK: Tensor | None = None) -> Tensor:
    """(N, K), ``gradient.T @ x``; the narrower operand is copied where that pays.

    Args:
        gradient_TN, x_TK: of the same dtype.
        out_NK: where it is written; None: into new memory, whose strides may be those of a transposed (K, N).
    """
    copies = transposing_pays(gradient_TN.dtype, gradient_TN.device.type)
    if copies and gradient_TN.shape[1] > x_TK.shape[1]:
        product_NK = (x_TK.t().contiguous() @ gradient_TN).t()
        return product_NK if out_NK is None else out_NK.copy_(product_NK)
    gradient_NT = gradient_TN.t().contiguous() if copies else gradient_TN.t()
    return gradient_NT @ x_TK if out_NK is None else torch.mm(gradient_NT, x_TK, out=out_NK)
