"""Linear and cross-entropy a few rows at a time: logits of all tokens never exist at once.

Gradients are computed while the logits of a chunk are there, in forward; backward multiplies them by the incoming
number, so that it may be called again. Products are three as in the plain form.

The weight's gradient is a sum over chunks. Rounded to 8 bits after each of them it gets worse with every chunk
(Liger-Kernel 512, OLMo-core 370). A sum in fp32 would need a copy in the dtype of the weight at the end, half as much
memory again; so the sum is held as two tensors of the weight's dtype, what it is rounded to and what that leaves, which
together have 16 bits, or 22 in fp16. Its first part is the result.

It is an ``autograd.Function`` and no custom operator: counts of live bytes and of operations then see what is inside.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.engine.ops._compiled import compiled
from drivetrain.engine.ops._cross_entropy_checks import IGNORE_INDEX, check_cross_entropy, counted_weights
from drivetrain.engine.ops._weight_gradient import weight_gradient

__all__ = ["LOGITS_AT_ONCE", "chunked_cross_entropy", "compiled_cross_entropy"]

LOGITS_AT_ONCE = 1 << 25
"""Of a chunk, in the dtype of the products: 64 MB in bf16. Fewer rows make products slower and leave more sums."""

_WIDE_AT_ONCE = {"cpu": 1 << 18}
"""Of these in fp32. On a CPU 1 MB, which stays in a core's cache; elsewhere all of a chunk would be 128 MB."""

_WORDS_AT_ONCE = 2048
"""Rows of the weight's gradient that are summed at once, so that what is summed takes little memory."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    chunk_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """As the reference. Differentiable once."""
    return _cross_entropy(
        hidden, weight, labels, token_weights, ignore_index, z_loss, chunk_rows, compiles=False
    )


def compiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    chunk_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """As :func:`chunked_cross_entropy`, with all between the products compiled by Inductor."""
    return _cross_entropy(
        hidden, weight, labels, token_weights, ignore_index, z_loss, chunk_rows, compiles=True
    )


def _cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None,
    ignore_index: int,
    z_loss: float,
    chunk_rows: int,
    *,
    compiles: bool,
) -> tuple[Tensor, Tensor]:
    check_cross_entropy(hidden, weight, labels, token_weights, chunk_rows)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    weights = counted_weights(labels, token_weights, ignore_index, wide)
    rows = chunk_rows or max(1, LOGITS_AT_ONCE // max(1, weight.shape[0]))
    recording = torch.is_grad_enabled()
    total: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        labels.masked_fill(weights == 0, 0),
        weights,
        z_loss,
        rows,
        recording and hidden.requires_grad,
        recording and weight.requires_grad,
        compiles,
    )
    return total, weights.sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        weights_T: Tensor,
        z_loss: float,
        rows: int,
        hidden_wanted: bool,
        weight_wanted: bool,
        compiles: bool,
    ) -> Tensor:
        tokens = hidden_TD.shape[0]
        total = weights_T.new_zeros(())
        of_hidden_TD = torch.empty_like(hidden_TD) if hidden_wanted else None
        of_weight = _Sum(weight_VD, chunks=-(-tokens // rows), compiles=compiles) if weight_wanted else None
        for first in range(0, tokens, rows):
            chunk = slice(first, first + rows)
            # A token that does not count may hold anything: zero times not-a-number is not zero.
            hidden_CD = hidden_TD[chunk].masked_fill((weights_T[chunk] == 0)[:, None], 0.0)
            logits_CV = F.linear(hidden_CD, weight_VD)
            total += _losses(
                logits_CV,
                labels_T[chunk],
                weights_T[chunk],
                z_loss,
                hidden_wanted or weight_wanted,
                _COMPILED_LOSSES if compiles else _losses_of_rows,
            )
            # Where gradients are wanted, the memory of the logits holds theirs from here on.
            if of_hidden_TD is not None:
                of_hidden_TD[chunk] = logits_CV @ weight_VD
            if of_weight is not None:
                of_weight.add(logits_CV, hidden_CD)
            # Before the next chunk's are there.
            del logits_CV
        ctx.save_for_backward(of_hidden_TD, None if of_weight is None else of_weight.total_VD)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden_TD, of_weight_VD = ctx.saved_tensors
        of_hidden, of_weight = (
            None if one is None else _scaled(one, gradient) for one in (of_hidden_TD, of_weight_VD)
        )
        return of_hidden, of_weight, None, None, None, None, None, None, None


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """``x * factor`` rounded once; a factor rounded to the dtype of x would put all of it off by as much."""
    if x.dtype == factor.dtype:
        return x * factor
    scaled = torch.empty_like(x)
    for few, out in zip(x.split(_WORDS_AT_ONCE), scaled.split(_WORDS_AT_ONCE), strict=True):
        out.copy_(few.to(factor.dtype).mul_(factor))
    return scaled


_OfRows = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]


def _losses(
    logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, z_loss: float, replaced: bool, of_rows: _OfRows
) -> Tensor:
    """Weighted sum of a chunk's losses; if ``replaced``, logits are overwritten with their gradients."""
    rows = max(1, _WIDE_AT_ONCE.get(logits_CV.device.type, LOGITS_AT_ONCE) // max(1, logits_CV.shape[1]))
    total = weights_C.new_zeros(())
    for first in range(0, logits_CV.shape[0], rows):
        few = slice(first, first + rows)
        total += of_rows(logits_CV[few], labels_C[few, None], weights_C[few, None], z_loss, replaced)
    return total


def _losses_of_rows(
    logits_RV: Tensor, label_R1: Tensor, weight_R1: Tensor, z_loss: float, replaced: bool
) -> Tensor:
    wide_RV = logits_RV.to(weight_R1.dtype)
    largest_R1 = wide_RV.amax(dim=-1, keepdim=True)
    of_label_R1 = wide_RV.gather(1, label_R1)
    powers_RV = (wide_RV - largest_R1).exp()
    sums_R1 = powers_RV.sum(dim=-1, keepdim=True)
    log_sums_R1 = sums_R1.log()
    # The larger two numbers first: their difference is small where the label is the likeliest word.
    losses_R1 = (largest_R1 - of_label_R1) + log_sums_R1
    normaliser_R1 = largest_R1 + log_sums_R1
    if z_loss:
        losses_R1 = losses_R1 + z_loss * normaliser_R1.square()
    if replaced:
        factor_R1 = weight_R1 * (1.0 + 2.0 * z_loss * normaliser_R1) if z_loss else weight_R1
        is_label_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) == label_R1
        logits_RV.copy_(powers_RV * (factor_R1 / sums_R1) - is_label_RV * weight_R1)
    return (weight_R1 * losses_R1).sum()


class _Sum:
    """Sum over chunks of ``gradient.T @ hidden`` in the shape and dtype of the weight.

    Attributes:
        total_VD: the sum so far.
    """

    def __init__(self, like_VD: Tensor, *, chunks: int, compiles: bool) -> None:
        # The first chunk writes it.
        made = torch.empty if chunks else torch.zeros
        self.total_VD = made(like_VD.shape, dtype=like_VD.dtype, device=like_VD.device)
        self._rounds = torch.promote_types(like_VD.dtype, torch.float32) != like_VD.dtype
        self._left_VD: Tensor | None = None
        self._is_first = True
        self._add = _COMPILED_ADD if compiles else _add_a_few_rows_at_a_time

    def add(self, gradient_CV: Tensor, hidden_CD: Tensor) -> None:
        """Add one chunk's product."""
        if self._rounds and not self._is_first and self._left_VD is None:
            self._left_VD = torch.zeros_like(self.total_VD)
        for first in range(0, self.total_VD.shape[0], _WORDS_AT_ONCE):
            words = slice(first, first + _WORDS_AT_ONCE)
            if self._is_first:
                weight_gradient(gradient_CV[:, words], hidden_CD, self.total_VD[words])
                continue
            product_WD = weight_gradient(gradient_CV[:, words], hidden_CD)
            if self._left_VD is None:
                self.total_VD[words].add_(product_WD)
            else:
                self._add(product_WD, self.total_VD[words], self._left_VD[words])
        self._is_first = False


def _add_with_remainder(product_WD: Tensor, total_WD: Tensor, left_WD: Tensor) -> None:
    """Add to a sum held in two parts."""
    # Converted one by one: an operation of two dtypes is many times slower on a CPU.
    sum_WD = product_WD.float() + left_WD.float() + total_WD.float()
    rounded_WD = sum_WD.to(total_WD.dtype)
    total_WD.copy_(rounded_WD)
    left_WD.copy_(sum_WD - rounded_WD.float())


def _add_a_few_rows_at_a_time(product_WD: Tensor, total_WD: Tensor, left_WD: Tensor) -> None:
    """Of a few rows all that is computed stays in a core's cache."""
    rows = max(1, _WIDE_AT_ONCE.get(total_WD.device.type, LOGITS_AT_ONCE) // max(1, total_WD.shape[1]))
    for parts in zip(product_WD.split(rows), total_WD.split(rows), left_WD.split(rows), strict=True):
        _add_with_remainder(*parts)


_COMPILED_LOSSES: _OfRows = compiled(_losses_of_rows)
_COMPILED_ADD = compiled(_add_with_remainder)
