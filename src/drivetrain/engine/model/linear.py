"""A linear layer whose master weight is cast to the dtype of its input."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from drivetrain.engine.model.operators import UsesOperators

__all__ = ["JointProducts", "Linear"]

JointProducts = Callable[[Tensor], tuple[Tensor, ...]]
"""From the input of several matrices, as it comes from the norm before them, to the output of each."""


class Linear(UsesOperators, nn.Module):
    """``x @ weight.T + bias`` in the dtype of x. Parameters are left uninitialised.

    The masters stay fp32 (fp64 in a model built for fp64); autograd brings their gradients back to that
    dtype. There is no autocast, so the dtype of every product can be read off its input.

    Plain ``F.linear`` on purpose: on a Zen 5 core the bf16 weight gradient runs at 0.44 TFLOP/s against 0.49 of
    the other two products (T = 4096, 320 to 960 features), and copying an operand transposed first made it
    5% to 80% slower. On CPUs with AMX that copy is known to pay: a choice per machine and shape, not a rule.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        weight, bias = self.operands(x.dtype)
        return self.product(x, weight, bias)

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight (out_features, in_features) and bias (out_features,) in ``dtype``."""
        return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
