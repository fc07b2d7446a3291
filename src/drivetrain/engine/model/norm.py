"""RMSNorm and LayerNorm over the last dimension."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.config.model import ModelConfig

__all__ = ["LayerNorm", "RMSNorm", "make_norm"]


class RMSNorm(nn.Module):
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
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.epsilon)


class LayerNorm(nn.Module):
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
        if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
            # Torch sums the gradients of weight and bias row by row in 16 bits there: 7% off after 4,096 rows.
            return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), self.epsilon).to(
                x.dtype
            )
        return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), self.epsilon)


def make_norm(model: ModelConfig, size: int) -> RMSNorm | LayerNorm:
    """The norm that ``model.normalization`` names, over ``size`` features."""
    kind = RMSNorm if model.normalization == "RMSNorm" else LayerNorm
    return kind(size, model.norm_epsilon)
