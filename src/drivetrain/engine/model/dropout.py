"""Dropout as modules without parameters, one for each place where it acts, so that a place can be given another kind.

The masks come from torch's generator of the tensor's device, in the order in which the places are reached.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["AttentionFactors", "Dropout"]

AttentionFactors = Callable[[Tensor, int], Tensor]
"""Queries (T, H, K) of equally long documents and the number N of these to the factors, 0 or 1 / (1 - probability), of
their attention weights: (N, H, L, L), in the dtype of the queries."""


class Dropout(nn.Module):
    """In training each element becomes 0 with ``probability``, and is divided by 1 - probability otherwise."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) to the same shape and dtype."""
        return F.dropout(x_TD, self.probability, self.training) if self.probability else x_TD
