"""The two MLPs: gated SiLU, and GELU in its tanh form."""

import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.config.model import ModelConfig
from drivetrain.engine.model.linear import JointProducts, Linear
from drivetrain.engine.model.operators import UsesOperators, several, single
from drivetrain.engine.model.parts import HasParts
from drivetrain.engine.ops import gate_up_product, glu

__all__ = ["GELUMLP", "SwiGLUMLP", "make_mlp"]


class SwiGLUMLP(HasParts, UsesOperators, nn.Module):
    """``down(silu(gate(x)) * up(x))``; Shazeer, arXiv:2002.05202.

    Attributes:
        joint_products: computes gate and up of the input where it is not for the matrices alone to do.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        hidden, ffn, bias = model.hidden_size, model.ffn_size, model.add_bias_linear
        self.joint_products: JointProducts | None = None
        self.gate = Linear(hidden, ffn, bias=bias)
        self.up = Linear(hidden, ffn, bias=bias)
        self.down = Linear(ffn, hidden, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) to (T, D)."""
        gate_TF, up_TF = self._gate_and_up(x_TD)
        out_TD: Tensor = self.down(self.part("mlp_act", self._gated, gate_TF, up_TF))
        return out_TD

    def _gated(self, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        if (serving := self.serving("glu")) is not None:
            return single(serving.call(glu.OPERATOR, gate=gate_TF, up=up_TF, activation="silu"))
        return F.silu(gate_TF) * up_TF

    def _gate_and_up(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        if self.joint_products is not None:
            gate_TF, up_TF = self.joint_products(x_TD)
            return gate_TF, up_TF
        serving = self.serving("gate_up_product")
        if serving is None or self.gate.bias is not None:
            return self.gate(x_TD), self.up(x_TD)
        gate_FD, up_FD = (linear.weight.to(x_TD.dtype) for linear in (self.gate, self.up))
        gate_TF, up_TF = several(serving.call(gate_up_product.OPERATOR, x=x_TD, gate=gate_FD, up=up_FD))
        return gate_TF, up_TF


class GELUMLP(HasParts, nn.Module):
    """``down(gelu(up(x)))`` with the tanh approximation GPT-2 and GPT-3 were trained with.

    Attributes:
        joint_products: computes up of the input where it is not for the matrix alone to do.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        hidden, ffn, bias = model.hidden_size, model.ffn_size, model.add_bias_linear
        self.joint_products: JointProducts | None = None
        self.up = Linear(hidden, ffn, bias=bias)
        self.down = Linear(ffn, hidden, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) to (T, D)."""
        up_TF = self.up(x_TD) if self.joint_products is None else self.joint_products(x_TD)[0]
        out_TD: Tensor = self.down(self.part("mlp_act", _gelu, up_TF))
        return out_TD


def _gelu(up_TF: Tensor) -> Tensor:
    return F.gelu(up_TF, approximate="tanh")


def make_mlp(model: ModelConfig) -> SwiGLUMLP | GELUMLP:
    """The MLP that ``model.activation_func`` names."""
    return SwiGLUMLP(model) if model.activation_func == "swiglu" else GELUMLP(model)
