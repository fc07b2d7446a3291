"""The two MLPs: gated SiLU, and GELU in its tanh form."""

import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.config.model import ModelConfig
from drivetrain.engine.model.linear import Linear

__all__ = ["GELUMLP", "SwiGLUMLP", "make_mlp"]


class SwiGLUMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``; Shazeer, arXiv:2002.05202."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        hidden, ffn, bias = model.hidden_size, model.ffn_size, model.add_bias_linear
        self.gate = Linear(hidden, ffn, bias=bias)
        self.up = Linear(hidden, ffn, bias=bias)
        self.down = Linear(ffn, hidden, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) to (T, D)."""
        out_TD: Tensor = self.down(F.silu(self.gate(x_TD)) * self.up(x_TD))
        return out_TD


class GELUMLP(nn.Module):
    """``down(gelu(up(x)))`` with the tanh approximation GPT-2 and GPT-3 were trained with."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        hidden, ffn, bias = model.hidden_size, model.ffn_size, model.add_bias_linear
        self.up = Linear(hidden, ffn, bias=bias)
        self.down = Linear(ffn, hidden, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) to (T, D)."""
        out_TD: Tensor = self.down(F.gelu(self.up(x_TD), approximate="tanh"))
        return out_TD


def make_mlp(model: ModelConfig) -> SwiGLUMLP | GELUMLP:
    """The MLP that ``model.activation_func`` names."""
    return SwiGLUMLP(model) if model.activation_func == "swiglu" else GELUMLP(model)
