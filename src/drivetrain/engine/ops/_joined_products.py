"""One product for several weights of the same input, which stay parameters of their own."""

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.errors import DrivetrainError

__all__ = ["check_joined", "joined", "separate"]


def check_joined(operator: str, x: Tensor, weights: dict[str, Tensor]) -> None:
    """All weights are (N_i, K) in the dtype of x.

    Raises:
        DrivetrainError: one is not.
    """
    for name, weight in weights.items():
        if weight.dim() != 2 or x.dim() == 0 or weight.shape[1] != x.shape[-1]:
            raise DrivetrainError(
                f"{operator}: x has the shape {tuple(x.shape)}, {name} {tuple(weight.shape)}; they have to be (..., K) "
                "and (N, K)"
            )
        if weight.dtype != x.dtype:
            raise DrivetrainError(f"{operator}: x is {x.dtype}, {name} {weight.dtype}; convert one of them")


def separate(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """A product for each weight."""
    return tuple(F.linear(x, weight) for weight in weights)


def joined(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """One product with all weights below each other; the results are views of it.

    Forward copies the weights, backward the incoming gradients: that is what it costs. The gradient of x is one product
    as well, so that the sum over weights is not rounded in between.
    """
    return torch.split(F.linear(x, torch.cat(weights)), [weight.shape[0] for weight in weights], dim=-1)
