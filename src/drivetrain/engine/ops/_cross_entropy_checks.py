"""What linear and cross-entropy asks of its arguments, and which tokens count."""

import torch
from torch import Tensor

from drivetrain.errors import DrivetrainError

__all__ = ["IGNORE_INDEX", "check_cross_entropy", "counted_weights"]

IGNORE_INDEX = -100
"""The label of tokens that do not count; torch's."""


def check_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor | None, chunk_rows: int
) -> None:
    """Shapes and dtypes; labels are not read.

    Raises:
        DrivetrainError: something does not fit.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise DrivetrainError(
            f"linear_cross_entropy: hidden has the shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}; they "
            "have to be (T, D) and (V, D)"
        )
    if hidden.dtype != weight.dtype:
        raise DrivetrainError(
            f"linear_cross_entropy: hidden is {hidden.dtype}, weight {weight.dtype}; convert one of them"
        )
    if labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        raise DrivetrainError(
            f"linear_cross_entropy: labels are {labels.dtype} {tuple(labels.shape)}; they have to be int64 "
            f"({hidden.shape[0]},)"
        )
    if token_weights is not None:
        if token_weights.shape != hidden.shape[:1] or not token_weights.is_floating_point():
            raise DrivetrainError(
                f"linear_cross_entropy: token_weights are {token_weights.dtype} {tuple(token_weights.shape)}; they "
                f"have to be floating point ({hidden.shape[0]},)"
            )
        if torch.is_grad_enabled() and token_weights.requires_grad:
            raise DrivetrainError("linear_cross_entropy: token_weights get no gradient: detach them")
    if chunk_rows < 0:
        raise DrivetrainError(f"linear_cross_entropy: chunk_rows = {chunk_rows}; it has to be 0 or more")


def counted_weights(
    labels: Tensor, token_weights: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """(T,) weights in ``dtype``, zero where a token is ignored; no gradient."""
    counted = labels != ignore_index
    if token_weights is None:
        return counted.to(dtype)
    return torch.where(
        counted, token_weights.detach().to(dtype), torch.zeros((), dtype=dtype, device=labels.device)
    )
