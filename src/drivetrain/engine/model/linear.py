"""A linear layer whose master weight is cast to the dtype of its input."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Linear"]


class Linear(nn.Module):
    """``x @ weight.T + bias`` in the dtype of x. Parameters are left uninitialised.

    The masters stay fp32 (fp64 in a model built for fp64); autograd brings their gradients back to that
    dtype. There is no autocast, so the dtype of every product can be read off its input.

    Plain ``F.linear`` on purpose: on a Zen 5 core the bf16 weight gradient runs at the speed of the other
    two products (0.44 against 0.49 TFLOP/s at T = 4096), and transposing an operand first made it 5-40%
    slower. On CPUs with AMX the copy is known to pay, as a choice per shape rather than a rule.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)
