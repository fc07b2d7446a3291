"""Transformer Engine's ``DotProductAttention``: how our mask maps to its arguments.

Never run by us: no device was at hand. What is tested is the mapping, against its documented arguments. Which kernel
serves, its own, cuDNN's or flash-attn's, is its choice, and variables of the environment (``NVTE_…``) change it.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops.adapters.library import HALVES, served_by
from drivetrain.engine.ops.adapters.transformer_engine import LIBRARY
from drivetrain.engine.ops.attention.call import check_call, crosses, mask_of, softmax_scale, zeros
from drivetrain.engine.ops.attention.mask import CAUSAL, Mask
from drivetrain.engine.ops.operator import Backend
from drivetrain.engine.ops.signature import Signature

__all__ = ["BACKEND", "LIBRARY", "attention", "module_of", "refuses", "rule", "supports"]

WIDEST = 256
EVERY = 8


def refuses(mask: Mask, crosses: bool) -> str | None:
    """Why a mask is not served; None where it is."""
    if mask.prefix is not None:
        return "transformer_engine has a prefix mask for padded batches alone, as a mask of all pairs"
    if mask.softcap is not None:
        return "transformer_engine has no soft-cap"
    if mask.seeded:
        return "transformer_engine draws dropout from its own generator; it takes no seed"
    if mask.slopes is not None and not mask.causal:
        return "transformer_engine documents ALiBi's sign for keys before their query alone"
    if mask.slopes is not None and crosses and mask.alignment == "top_left":
        return "transformer_engine's ALiBi aligns bottom_right"
    blind = crosses and mask.causal and (mask.alignment == "bottom_right" or mask.window is not None)
    if blind or (mask.documents is not None and mask.documents.keyless):
        return "transformer_engine's results for queries that see no key are not documented"
    return None


def rule(signature: Signature) -> str | None:
    """Why it does not compute a call, wherever it ran; None where it does."""
    q = signature.argument("q")
    assert q is not None
    if q.shape[2] > WIDEST or q.shape[2] % EVERY:
        return f"heads are {q.shape[2]} wide; transformer_engine's kernels take multiples of {EVERY} up to {WIDEST}"
    return refuses(mask_of(signature), crosses(signature))


supports = served_by(LIBRARY, rule, HALVES, lambda: ("cuda",))


@functools.lru_cache(maxsize=64)
def module_of(heads: int, width: int, groups: int, scale: float, dropout: float) -> Any:
    """It has no weights, and is slow to make."""
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads,
        width,
        num_gqa_groups=groups,
        attention_dropout=dropout,
        qkv_format="thd",
        softmax_scale=scale,
    )


# Traced, the borders would be constants of a graph, and each packing would compile another.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL, scale: float | None = None) -> Tensor:
    """As the reference."""
    spans = [span for span in check_call(q, k, v, mask) if span.queries or span.keys]
    if not spans:
        return zeros(q, k, v)
    borders_q = torch.tensor([0, *(span.last_q for span in spans)], dtype=torch.int32)
    borders_k = torch.tensor([0, *(span.last_k for span in spans)], dtype=torch.int32)
    last_q, last_k = spans[-1].last_q, spans[-1].last_k
    heads, width = q.shape[1:]
    dropout = 0.0 if mask.dropout is None else mask.dropout.probability
    bottom_right = mask.alignment == "bottom_right"
    kind = "padding"
    if mask.causal:
        kind = "padding_causal_bottom_right" if bottom_right else "padding_causal"
    left = -1 if mask.window is None else mask.window - 1
    out: Tensor = module_of(heads, width, k.shape[1], softmax_scale(q, scale), dropout)(
        q[:last_q],
        k[:last_k],
        v[:last_k],
        cu_seqlens_q=borders_q.to(q.device),
        cu_seqlens_kv=borders_k.to(q.device),
        max_seqlen_q=max(span.queries for span in spans),
        max_seqlen_kv=max(span.keys for span in spans),
        attn_mask_type=kind,
        window_size=(left, 0) if mask.causal else (-1, -1),
        core_attention_bias_type="no_bias" if mask.slopes is None else "alibi",
        alibi_slopes=None if mask.slopes is None else mask.slopes.to(q.device, torch.float32),
    )
    # Heads come side by side. Beyond the last border there is no document: zero, and zero gradients by the slice.
    return torch.cat([out.reshape(last_q, heads, width), torch.zeros_like(q[last_q:])])


BACKEND = Backend(
    LIBRARY.name,
    attention,
    supports,
    library=str(LIBRARY),
    # flash-attn's backward, where it is the one that serves, adds in an order that changes.
    deterministic=False,
    kernels=("fused_attn", "flash_fwd", "flash_bwd", "cudnn_generated_fort_native_sdpa"),
)
