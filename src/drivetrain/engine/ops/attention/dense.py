"""The reference: softmax over a document's whole matrix of scores. Also the backend that serves every mask."""

import torch
from torch import Tensor

from drivetrain.engine.ops.attention.call import check_call, softmax_scale
from drivetrain.engine.ops.attention.dropout import draw_seed, kept
from drivetrain.engine.ops.attention.mask import CAUSAL, Mask, Span
from drivetrain.engine.ops.attention.pattern import pattern_of

__all__ = ["attention"]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL, scale: float | None = None) -> Tensor:
    """softmax over the keys that are seen of (c tanh(s q·k / c) - m_h |p - j|), times v; document by document.

    Args:
        q: queries, (Tq, H, K).
        k, v: keys and values, (Tk, G, K), of the dtype of the queries; head h reads group h // (H / G).
        mask: which keys are seen, and what is added.
        scale: s; None: 1/sqrt(K).

    Returns:
        (Tq, H, K) in the dtype of the queries. Scores are products in that dtype; the softmax is fp32, or fp64 in fp64.

    Memory grows with the square of a document's length.
    """
    scale = softmax_scale(q, scale)
    if mask.documents is not None:
        out: Tensor = _by_documents(q, k, v, mask, scale)
        return out
    (span,) = check_call(q, k, v, mask)
    return _document(q, k, v, mask, span, scale, _seed(mask))


# Traced, the borders would be constants of a graph, and each packing would compile another.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_documents(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    spans, seed = check_call(q, k, v, mask), _seed(mask)
    outs = []
    for span in spans:
        queries, keys = slice(span.first_q, span.last_q), slice(span.first_k, span.last_k)
        outs.append(_document(q[queries], k[keys], v[keys], mask, span, scale, seed))
    return torch.cat([*outs, torch.zeros_like(q[spans[-1].last_q :])])


def _seed(mask: Mask) -> int:
    if mask.dropout is None:
        return 0
    return int(draw_seed()) if mask.dropout.seed is None else mask.dropout.seed


def _document(
    q_LHK: Tensor, k_MGK: Tensor, v_MGK: Tensor, mask: Mask, span: Span, scale: float, seed: int
) -> Tensor:
    heads_per_group = q_LHK.shape[1] // k_MGK.shape[1]
    k_MHK, v_MHK = (x.repeat_interleave(heads_per_group, dim=1) for x in (k_MGK, v_MGK))
    rows, columns, device = range(span.queries), range(span.keys), q_LHK.device
    pattern = pattern_of(mask, span)
    scores_HLM = (q_LHK.transpose(0, 1) @ k_MHK.permute(1, 2, 0)) * scale
    scores_HLM = scores_HLM.to(torch.promote_types(q_LHK.dtype, torch.float32))
    if mask.softcap is not None:
        scores_HLM = mask.softcap * torch.tanh(scores_HLM / mask.softcap)
    if mask.slopes is not None:
        slopes_H11 = mask.slopes.to(device, scores_HLM.dtype)[:, None, None]
        scores_HLM = scores_HLM - slopes_H11 * pattern.distance(rows, columns, device).abs()
    seen_LM = pattern.allowed(rows, columns, device)
    if seen_LM is None:
        weights_HLM = scores_HLM.softmax(dim=-1)
    else:
        # A row that sees nothing is left whole for the softmax and zeroed after it: of -inf alone it would be nan,
        # and so would its gradient.
        sees_L1 = seen_LM.any(dim=-1, keepdim=True)
        weights_HLM = scores_HLM.masked_fill(~seen_LM & sees_L1, float("-inf")).softmax(dim=-1)
        weights_HLM = weights_HLM.masked_fill(~sees_L1, 0.0)
    if mask.dropout is not None:
        rows_of_all, columns_of_all = range(span.first_q, span.last_q), range(span.first_k, span.last_k)
        probability = mask.dropout.probability
        keep_HLM = kept(seed, probability, q_LHK.shape[1], rows_of_all, columns_of_all, device)
        weights_HLM = torch.where(keep_HLM, weights_HLM / (1.0 - probability), 0.0)
    out_HLK: Tensor = weights_HLM.to(v_MHK.dtype) @ v_MHK.transpose(0, 1)
    return out_HLK.transpose(0, 1)
