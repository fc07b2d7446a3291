"""Attention by torch's SDPA, document by document.

A run of neighbouring documents of equal lengths is a reshape and one call, so that whole sequences cost one call
whatever the batch. Where SDPA's own causal mask says all, nothing of the size of a document squared is made; under a
window, nothing larger than window times document. Against
one S x S mask over packed documents the gradients were found equal to the bit, and the time a multiple less.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.engine.ops.attention.bias_columns import MOST_KEYS, with_bias_columns
from drivetrain.engine.ops.attention.call import check_call, crosses, mask_of, softmax_scale, zeros
from drivetrain.engine.ops.attention.mask import CAUSAL, Mask, Span
from drivetrain.engine.ops.attention.padding import (
    frequent_length,
    generates_code_for_each_length,
    padded,
)
from drivetrain.engine.ops.attention.pattern import Pattern, pattern_of
from drivetrain.engine.ops.attention.runs import by_documents
from drivetrain.engine.ops.signature import Signature

__all__ = ["LEAST_QUERIES", "attention", "refuses", "run", "supports"]

LEAST_QUERIES = 256
"""Under a window, queries are cut into blocks of its length, but no shorter ones: each block is a call."""


def refuses(mask: Mask, _crosses: bool) -> str | None:
    """Why a mask is not served; None where it is."""
    if mask.softcap is not None:
        return "SDPA has no soft-cap"
    if mask.seeded:
        return "SDPA draws dropout from torch's generator; it takes no seed"
    return None


def supports(signature: Signature) -> str | None:
    """Any dtype that SDPA takes, on any device."""
    return refuses(mask_of(signature), crosses(signature))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL, scale: float | None = None) -> Tensor:
    """As the reference. With dropout SDPA leaves its fast kernel for one whose memory is quadratic (on a CPU).

    Compiled code has it in its graph where the mask has no documents.
    """
    scale = softmax_scale(q, scale)
    if mask.documents is not None:
        out: Tensor = by_documents(q, k, v, mask, scale, run)
        return out
    return run(q, k, v, check_call(q, k, v, mask), mask, scale)


def run(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, spans: list[Span], mask: Mask, scale: float) -> Tensor:
    """``spans``: documents of equal lengths, the only ones among these tokens."""
    documents, span = len(spans), spans[0]
    if span.queries == 0 or span.keys == 0:
        return zeros(q_THK, k_TGK, v_TGK)
    pattern = pattern_of(mask, span)
    rows, columns = range(span.queries), range(span.keys)
    by_document = [x.unflatten(0, (documents, -1)) for x in (q_THK, k_TGK, v_TGK)]
    if mask.dropout is None and generates_code_for_each_length(q_THK.dtype, q_THK.device):
        length = frequent_length(span.queries)
        if span.queries == span.keys and _causal_alone(pattern, range(length)):
            by_document = [padded(x, length) for x in by_document]
            rows = columns = range(length)
    q, k, v = (x.transpose(1, 2) for x in by_document)
    block = max(pattern.window, LEAST_QUERIES)
    if pattern.window == 0 or _causal_alone(pattern, rows) or span.queries <= block:
        out = _rectangle(q, k, v, pattern, rows, columns, mask, scale)
    else:
        outs = []
        for number, q_block in enumerate(torch.split(q, block, dim=2)):
            rows = range(number * block, number * block + q_block.shape[2])
            columns = pattern.keys(rows, span.keys)
            k_block, v_block = (x[:, :, columns.start : columns.stop] for x in (k, v))
            outs.append(_rectangle(q_block, k_block, v_block, pattern, rows, columns, mask, scale))
        out = torch.cat(outs, dim=2)
    return out[:, :, : span.queries].transpose(1, 2).flatten(0, 1)


def _rectangle(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, rows: range, columns: range, mask: Mask, scale: float
) -> Tensor:
    """(N, H, rows, K): queries of these numbers in their documents, keys of those; all that is seen is among them."""
    if len(columns) == 0:
        return zeros(q, k, v)
    causal, bias = _causal_alone(pattern, rows) and columns.start == 0, None
    seen = None if causal else pattern.allowed(rows, columns, q.device)
    width = q.shape[-1]
    if mask.slopes is not None and _by_columns(q, pattern, columns):
        # The columns of keys count from the first that is here: a constant of each row, as any.
        q, k, v = with_bias_columns(q, k, v, mask.slopes, scale)
    elif mask.slopes is not None:
        bias, causal, seen = _bias(q, mask.slopes, pattern, rows, columns), False, None
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=seen if bias is None else bias,
        dropout_p=0.0 if mask.dropout is None else mask.dropout.probability,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[..., :width]


def _causal_alone(pattern: Pattern, rows: range) -> bool:
    """Whether SDPA's causal mask, aligned top left, is the whole pattern of these queries."""
    window_idle = pattern.window == 0 or pattern.window >= rows.stop + pattern.offset
    return pattern.causal and pattern.offset == 0 and rows.start == 0 and window_idle and pattern.prefix <= 1


def _by_columns(q: Tensor, pattern: Pattern, columns: range) -> bool:
    """In fp32 the sum of a large column and a small product loses digits that the dense softmax keeps; and columns
    are linear in the distance, which a query has on both sides where it sees later keys."""
    linear = pattern.causal and pattern.prefix <= 1
    return q.dtype in (torch.bfloat16, torch.float16) and linear and len(columns) <= MOST_KEYS


def _bias(q_NHLK: Tensor, slopes_H: Tensor, pattern: Pattern, rows: range, columns: range) -> Tensor:
    """(1, H, L, M): what is added to the scores, -inf where a key is not seen. With three dimensions SDPA is slow."""
    dtype, device = torch.promote_types(q_NHLK.dtype, torch.float32), q_NHLK.device
    distance = pattern.distance(rows, columns, device).abs()
    bias = -slopes_H.to(device, dtype)[None, :, None, None] * distance
    seen = pattern.allowed(rows, columns, device)
    return bias if seen is None else bias.masked_fill(~seen, float("-inf"))
