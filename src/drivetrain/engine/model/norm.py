"""RMSNorm and LayerNorm over the last dimension."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.config.model import ModelConfig
from drivetrain.engine.model.operators import UsesOperators, several, single
from drivetrain.engine.ops import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["LayerNorm", "RMSNorm", "make_norm"]


class RMSNorm(UsesOperators, nn.Module):
    """``x / sqrt(mean(x^2) + epsilon) * weight``; torch keeps the statistic of a bf16 x in fp32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) to the same shape and dtype."""
        return self.normalise(x, self.weight)

    def normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        """``forward`` with ``weight`` in the place of the own one."""
        if (serving := self.serving("rms_norm")) is not None:
            return single(
                serving.call(rms_norm.OPERATOR, x=x, weight=weight.to(x.dtype), epsilon=self.epsilon)
            )
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.epsilon)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum."""
        return self.add_and_normalise(x, residual, self.weight)

    def add_and_normalise(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """``add`` with ``weight`` in the place of the own one."""
        if (serving := self.serving("add_rms_norm")) is not None:
            given = {"x": x, "residual": residual, "weight": weight.to(x.dtype), "epsilon": self.epsilon}
            normed, total = several(serving.call(add_rms_norm.OPERATOR, **given))
            return normed, total
        total = x + residual
        return self.normalise(total, weight), total


class LayerNorm(UsesOperators, nn.Module):
    """``(x - mean) / sqrt(variance + epsilon) * weight + bias``; statistics of a bf16 x in fp32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) to the same shape and dtype."""
        return self.normalise(x, self.weight, self.bias)

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """``forward`` with ``weight`` and ``bias`` in the place of the own ones."""
        if (serving := self.serving("layer_norm")) is not None:
            given = {"x": x, "weight": weight, "bias": bias, "epsilon": self.epsilon}
            return single(serving.call(layer_norm.OPERATOR, **given))
        if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
            # Torch sums the gradients of weight and bias row by row in 16 bits there: 7% off after 4,096 rows.
            return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), self.epsilon).to(
                x.dtype
            )
        return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), self.epsilon)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum."""
        return self.add_and_normalise(x, residual, self.weight, self.bias)

    def add_and_normalise(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``add`` with ``weight`` and ``bias`` in the place of the own ones."""
        if (serving := self.serving("add_layer_norm")) is not None:
            given = {"x": x, "residual": residual, "weight": weight, "bias": bias, "epsilon": self.epsilon}
            normed, total = several(serving.call(add_layer_norm.OPERATOR, **given))
            return normed, total
        total = x + residual
        return self.normalise(total, weight, bias), total


def make_norm(model: ModelConfig, size: int) -> RMSNorm | LayerNorm:
    """The norm that ``model.normalization`` names, over ``size`` features."""
    kind = RMSNorm if model.normalization == "RMSNorm" else LayerNorm
    return kind(size, model.norm_epsilon)
