"""Output projection and cross-entropy together, so that logits never exist in fp32 all at once.

Backward is two matrix products, and each is a node of autograd's graph by itself. A pass that asks for the gradient of
the hidden states alone, as the first of the two of a zero-bubble pipeline does, then computes one of them, and the pass
that asks for the weight's the other. Inside one node both would be computed both times: ``ctx.needs_input_grad``
says what forward knew, whatever a pass asks for (torch 2.13).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.engine.ops._cross_entropy_checks import IGNORE_INDEX, check_cross_entropy
from drivetrain.engine.ops.signature import Signature

__all__ = [
    "LOGITS_PER_CHUNK",
    "LOGITS_PER_CHUNK_ELSEWHERE",
    "in_place_cross_entropy",
    "in_place_refuses",
    "linear_cross_entropy_sum",
    "product_gradients",
    "scaled_mask",
]

LOGITS_PER_CHUNK = {"cpu": 1 << 19}
"""Logits held in fp32 at once. On a CPU 2 MB: they stay in a core's cache, and malloc reuses them without
page faults. Elsewhere 256 MB, large enough to fill a device (a choice that has not been timed)."""
LOGITS_PER_CHUNK_ELSEWHERE = 1 << 26


def in_place_refuses(signature: Signature) -> str | None:
    """The predicate of the backend."""
    if signature.option("z_loss"):
        return "the in-place loss has no z-loss"
    if signature.argument("token_weights") is not None:
        return "the in-place loss has no weights of tokens"
    if signature.option("chunk_rows"):
        return "chunk_rows asks for logits of a few rows; the in-place loss holds those of all, in the dtype of hidden"
    return None


def in_place_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    chunk_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """As the reference, without z-loss, weights of tokens and chunks. Differentiable once."""
    check_cross_entropy(hidden, weight, labels, token_weights, chunk_rows)
    assert token_weights is None, "refused by the predicate"
    assert not z_loss, "refused by the predicate"
    counted_T = labels != ignore_index
    # A token that does not count may hold anything: zero times not-a-number is not zero.
    hidden = hidden.masked_fill(~counted_T[:, None], 0.0)
    total = linear_cross_entropy_sum(hidden, weight, labels.masked_fill(~counted_T, 0), counted_T)
    return total, counted_T.sum(dtype=total.dtype)


def linear_cross_entropy_sum(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, mask_T: Tensor, gradient_scale: float = 1.0
) -> Tensor:
    """Sum over the unmasked tokens of the cross-entropy of ``hidden @ weight.T``.

    Equal to ``F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")`` over the unmasked
    tokens, with fp32 softmax and fp32 sum. The (T, V) logits exist once, in the compute dtype: the fp32
    softmax takes a few rows at a time, and the gradient of these rows replaces them. Backward is two matrix
    products. At T = 4096, D = 320, V = 8192 in bf16 on one Zen 5 core, forward and backward take 214 ms
    against 429 ms of the plain form (159 ms are the three products).

    No boolean indexing: shapes do not depend on the mask, and nothing is read on the host. If every token is
    masked the sum and the gradients are 0.

    Args:
        hidden_TD: (T, D), the output of the final norm.
        weight_VD: (V, D), in the dtype of ``hidden_TD``.
        labels_T: (T,) int64, in [0, V) everywhere.
        mask_T: (T,) bool, tokens that count.
        gradient_scale: a power of two by which the gradient of the logits is multiplied before it is rounded to their
            dtype, and divided by after its matrix products. The incoming gradient is known in backward only, and in
            fp16 what it does not make small enough overflows in the product.

    Returns:
        Scalar, fp32; fp64 for fp64 inputs. Differentiable once.
    """
    needs_gradient = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    loss: Tensor = _LinearCrossEntropySum.apply(  # type: ignore[no-untyped-call]
        *product_gradients(hidden_TD, weight_VD),
        hidden_TD.detach(),
        weight_VD.detach(),
        labels_T,
        mask_T,
        gradient_scale,
        needs_gradient,
    )
    return loss


def product_gradients(hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward of ``hidden @ weight.T``, for a Function that computes the product itself.

    Returns:
        What the Function takes besides the operands, which it takes detached: logits (T, V) and their factor, a scalar,
        for the hidden states, and once more for the weight. They hold no memory and mean nothing. Its backward returns
        to each of the four what they stand for: the gradient of the logits is their product, the factor is multiplied
        in after the matrix product.
    """
    hidden: tuple[Tensor, Tensor] = _HiddenGradient.apply(  # type: ignore[no-untyped-call]
        hidden_TD, weight_VD.detach()
    )
    weight: tuple[Tensor, Tensor] = _WeightGradient.apply(  # type: ignore[no-untyped-call]
        weight_VD, hidden_TD.detach()
    )
    return *hidden, *weight


def _chunk_loss(logits_CV: Tensor, labels_C1: Tensor, mask_C1: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk of rows, and their probabilities in the dtype of the sum.

    The largest logit m has probability exp(0) / sum(exp(x - m)): it gives the normaliser without a second
    exponential over the vocabulary, and its logarithm is taken of a number between 1/V and 1.
    """
    sum_dtype = torch.promote_types(logits_CV.dtype, torch.float32)
    probabilities_CV = F.softmax(logits_CV, dim=-1, dtype=sum_dtype)
    largest_C1 = logits_CV.amax(dim=-1, keepdim=True).to(sum_dtype)
    normaliser_C1 = probabilities_CV.amax(dim=-1, keepdim=True).log_().neg_()
    losses_C1 = normaliser_C1 + (largest_C1 - logits_CV.gather(1, labels_C1).to(sum_dtype))
    return losses_C1.masked_fill_(~mask_C1, 0.0).sum(), probabilities_CV


def _chunk_gradient(probabilities_CV: Tensor, labels_C1: Tensor, factor_C1: Tensor) -> Tensor:
    """``(softmax - one_hot) * factor`` in the memory of the probabilities."""
    probabilities_CV.scatter_(1, labels_C1, probabilities_CV.gather(1, labels_C1) - 1.0)
    return probabilities_CV.mul_(factor_C1)


def scaled_mask(mask: Tensor, scale: float) -> Tensor:
    """``mask * scale``; the mask itself for 1."""
    return mask if scale == 1.0 else mask * scale


def _stand_ins(hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    shape = (hidden_TD.shape[0], weight_VD.shape[0])
    # Of the loss's dtype: rounded to bf16, one over the number of tokens puts every gradient off by up to 2^-9.
    factor = hidden_TD.new_empty((), dtype=torch.promote_types(hidden_TD.dtype, torch.float32))
    return hidden_TD.new_empty_strided(shape, (0, 0)), factor


class _HiddenGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight_VD)
        return _stand_ins(hidden_TD, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TV: Tensor, factor: Tensor) -> tuple[Tensor, None]:
        (weight_VD,) = ctx.saved_tensors
        return (gradient_TV @ weight_VD) * factor, None


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_TD)
        return _stand_ins(hidden_TD, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TV: Tensor, factor: Tensor) -> tuple[Tensor, None]:
        (hidden_TD,) = ctx.saved_tensors
        return (gradient_TV.t() @ hidden_TD) * factor, None


class _LinearCrossEntropySum(torch.autograd.Function):
    """The gradient of the logits is known in forward already; backward only passes it on."""

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
        gradient_scale: float,
        needs_gradient: bool,
    ) -> Tensor:
        ctx.gradient_scale = gradient_scale
        logits_TV = F.linear(hidden_TD, weight_VD)
        per_chunk = LOGITS_PER_CHUNK.get(logits_TV.device.type, LOGITS_PER_CHUNK_ELSEWHERE)
        rows = max(1, per_chunk // logits_TV.shape[1])
        loss = torch.zeros(
            (), dtype=torch.promote_types(logits_TV.dtype, torch.float32), device=logits_TV.device
        )
        for logits_CV, labels_C, mask_C in zip(
            torch.split(logits_TV, rows), torch.split(labels_T, rows), torch.split(mask_T, rows), strict=True
        ):
            labels_C1, mask_C1 = labels_C[:, None], mask_C[:, None]
            chunk_sum, probabilities_CV = _chunk_loss(logits_CV, labels_C1, mask_C1)
            loss += chunk_sum
            if needs_gradient:
                # Nobody else sees these logits: their memory holds their gradient from here on.
                factor_C1 = scaled_mask(mask_C1, gradient_scale)
                logits_CV.copy_(_chunk_gradient(probabilities_CV, labels_C1, factor_C1))
        if needs_gradient:
            ctx.save_for_backward(logits_TV)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_TV,) = ctx.saved_tensors
        factor = loss_gradient / ctx.gradient_scale
        return gradient_TV, factor, gradient_TV, factor, *[None] * 6
