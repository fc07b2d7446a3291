"""Embedding, output matrix and cross-entropy with the vocabulary spread over ranks; no rank holds a token's logits.

The loss needs three numbers of each token from every rank: its largest logit, the sum of its exponentials, and the
logit of its label, which one rank has. They travel in two all-reduces of fp32 (fp64 in an fp64 model), (T,) and
(2, T), whatever the vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from drivetrain.engine.model.loss import OutputHead
from drivetrain.engine.ops._in_place_cross_entropy import (
    LOGITS_PER_CHUNK,
    LOGITS_PER_CHUNK_ELSEWHERE,
    product_gradients,
    scaled_mask,
)
from drivetrain.engine.parallel.collectives import Group, joined, scattered, summed

__all__ = ["VocabularyParallelEmbedding", "VocabularyParallelHead"]


class VocabularyParallelEmbedding(nn.Module):
    """This rank's rows of an embedding, ``[offset, offset + len(weight))``."""

    def __init__(self, weight: nn.Parameter, offset: int, group: Group, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = weight
        self.offset = offset
        self.group = group
        self.sequence_parallel = sequence_parallel

    def forward(self, rows_T: Tensor) -> Tensor:
        """(T,) int64 to (T, D); under sequence parallelism to this rank's (T / ranks, D). Dtype of the masters."""
        own_T, held_T = _own_rows(rows_T, self.offset, self.weight.shape[0])
        x_TD = F.embedding(own_T, self.weight).masked_fill(~held_T[:, None], 0.0)
        return scattered(x_TD, self.group) if self.sequence_parallel else summed(x_TD, self.group)


class VocabularyParallelHead(OutputHead):
    """The head of a decoder whose output matrix has this rank's rows of the vocabulary.

    Its input (T, D) is equal on all ranks, and so is what it returns. The gradient of the input is this rank's
    summand of it: whoever made the input sums it.
    """

    def __init__(self, group: Group, offset: int, vocab_size: int) -> None:
        self.group = group
        self.offset = offset
        self.vocab_size = vocab_size

    def logits(self, hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
        """All logits, (T, V), on every rank: for text generation and checks, never for the loss."""
        return joined(F.linear(hidden_TD, weight_VD), self.group, self.offset, self.vocab_size)

    def cross_entropy_sum(
        self, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, mask_T: Tensor
    ) -> Tensor:
        """As :func:`drivetrain.engine.ops._in_place_cross_entropy.linear_cross_entropy_sum`, with labels of the whole
        vocabulary."""
        needs_gradient = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
        loss: Tensor = _VocabularyParallelCrossEntropySum.apply(  # type: ignore[no-untyped-call]
            *product_gradients(hidden_TD, weight_VD),
            hidden_TD.detach(),
            weight_VD.detach(),
            labels_T,
            mask_T,
            self.offset,
            self.group,
            1.0 if self.gradient_scale is None else self.gradient_scale,
            needs_gradient,
        )
        return loss


def _own_rows(rows_T: Tensor, offset: int, length: int) -> tuple[Tensor, Tensor]:
    """Row numbers counted from ``offset``, 0 where they are another rank's, and which are this rank's."""
    own_T = rows_T - offset
    held_T = (own_T >= 0) & (own_T < length)
    return own_T.masked_fill(~held_T, 0), held_T


class _VocabularyParallelCrossEntropySum(torch.autograd.Function):
    """As the loss of one device, the gradient takes the memory of the logits in forward already.

    The softmax over this rank's columns is computed twice, before and after the ranks have spoken: kept instead, it
    would be a second (T, V) tensor in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        _logits_for_hidden_TV: Tensor,
        _factor_for_hidden: Tensor,
        _logits_for_weight_TV: Tensor,
        _factor_for_weight: Tensor,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        mask_T: Tensor,
        offset: int,
        group: Group,
        gradient_scale: float,
        needs_gradient: bool,
    ) -> Tensor:
        ctx.gradient_scale = gradient_scale
        logits_TV = F.linear(hidden_TD, weight_VD)
        tokens, columns = logits_TV.shape
        sum_dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        per_chunk = LOGITS_PER_CHUNK.get(logits_TV.device.type, LOGITS_PER_CHUNK_ELSEWHERE)
        rows = max(1, per_chunk // columns)
        chunks = [slice(first, first + rows) for first in range(0, tokens, rows)]
        own_T, held_T = _own_rows(labels_T, offset, columns)

        largest_T = torch.empty(tokens, dtype=sum_dtype, device=logits_TV.device)
        sums_T = torch.empty_like(largest_T)
        for chunk in chunks:
            largest_T[chunk] = logits_TV[chunk].amax(dim=-1)
            # The largest logit has probability exp(0) / sum(exp(x - largest)).
            sums_T[chunk] = F.softmax(logits_TV[chunk], dim=-1, dtype=sum_dtype).amax(dim=-1).reciprocal_()
        label_logits_T = logits_TV.gather(1, own_T[:, None])[:, 0].to(sum_dtype).masked_fill_(~held_T, 0.0)

        largest_of_all_T = group.all_reduce(largest_T, dist.ReduceOp.MAX)
        sums_T *= (largest_T - largest_of_all_T).exp_()
        sums_of_all_T, label_logits_T = group.all_reduce(torch.stack([sums_T, label_logits_T]))
        losses_T = sums_of_all_T.log() + (largest_of_all_T - label_logits_T)
        loss: Tensor = losses_T.masked_fill_(~mask_T, 0.0).sum()

        if needs_gradient:
            share_T1 = (sums_T / sums_of_all_T)[:, None]
            for chunk in chunks:
                probabilities_CV = F.softmax(logits_TV[chunk], dim=-1, dtype=sum_dtype).mul_(share_T1[chunk])
                held_C1 = held_T[chunk, None].to(sum_dtype)
                probabilities_CV.scatter_add_(1, own_T[chunk, None], -held_C1)
                # Nobody else sees these logits: their memory holds their gradient from here on.
                logits_TV[chunk] = probabilities_CV.mul_(scaled_mask(mask_T[chunk, None], gradient_scale))
            ctx.save_for_backward(logits_TV)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_TV,) = ctx.saved_tensors
        factor = loss_gradient / ctx.gradient_scale
        return gradient_TV, factor, gradient_TV, factor, *[None] * 8
