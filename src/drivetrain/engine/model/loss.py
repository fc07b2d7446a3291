"""What a decoder makes of its last hidden states: logits, or the loss without ever holding all logits in fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.engine.model.operators import UsesOperators, several
from drivetrain.engine.ops import linear_cross_entropy
from drivetrain.engine.ops._cross_entropy_checks import IGNORE_INDEX
from drivetrain.engine.ops._in_place_cross_entropy import linear_cross_entropy_sum

__all__ = ["OutputHead"]


class OutputHead(UsesOperators):
    """What a decoder computes from the output of its final norm (T, D) and its output matrix (V, D).

    Attributes:
        gradient_scale: a power of two by which gradients are multiplied inside of the loss, and divided by at its ends:
            they are computed in forward, before what scales the loss in fp16 is known. None: no scaling.
    """

    gradient_scale: float | None = None

    def logits(self, hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
        """(T, V) in the dtype of both."""
        return F.linear(hidden_TD, weight_VD)

    def cross_entropy_sum(
        self, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, mask_T: Tensor
    ) -> Tensor:
        """As :func:`drivetrain.engine.ops._in_place_cross_entropy.linear_cross_entropy_sum`."""
        if (serving := self.serving("linear_cross_entropy")) is None:
            scale = 1.0 if self.gradient_scale is None else self.gradient_scale
            return linear_cross_entropy_sum(hidden_TD, weight_VD, labels_T, mask_T, scale)
        labels_T = labels_T.masked_fill(~mask_T, IGNORE_INDEX)
        given = {"hidden": hidden_TD, "weight": weight_VD, "labels": labels_T}
        if self.gradient_scale is None:
            total, _ = several(serving.call(linear_cross_entropy.OPERATOR, **given))
            return total
        # As weights of the tokens, so that a backend that cannot scale inside refuses, and says so.
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        weights_T = torch.full(labels_T.shape, self.gradient_scale, dtype=wide, device=labels_T.device)
        total, _ = several(serving.call(linear_cross_entropy.OPERATOR, **given, token_weights=weights_T))
        return total / self.gradient_scale
