"""Modules whose work operators of ``engine/ops`` can do instead of their own code, where a run asks for it."""

import torch.nn.functional as F
from torch import Tensor

from drivetrain.engine.ops import linear as linear_operator
from drivetrain.engine.ops.operator import Outputs
from drivetrain.engine.ops.selection import Selection

__all__ = ["UsesOperators", "several", "single"]


class UsesOperators:
    """What such a module inherits beside its own base.

    Attributes:
        operators: who serves; None: the module's own code does everything.
    """

    operators: Selection | None = None

    def take_operators(self, selection: Selection) -> None:
        """From here on compute by ``selection`` what it was asked to serve."""
        self.operators = selection

    def serving(self, operator: str) -> Selection | None:
        """Who computes that operator; None: the module's own code."""
        if self.operators is None or not self.operators.serves(operator):
            return None
        return self.operators

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``: (..., K) and (N, K) to (..., N), all in the dtype of x."""
        serving = self.serving("linear")
        if serving is None:
            return F.linear(x, weight, bias)
        return single(serving.call(linear_operator.OPERATOR, x=x, weight=weight, bias=bias))


def single(outputs: Outputs) -> Tensor:
    """The one output of an operator that has one."""
    assert isinstance(outputs, Tensor)
    return outputs


def several(outputs: Outputs) -> tuple[Tensor, ...]:
    """The outputs of an operator that has more than one."""
    assert isinstance(outputs, tuple)
    return outputs
