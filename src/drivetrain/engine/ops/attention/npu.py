"""Ascend's ``npu_fusion_attention``: how our mask maps to its arguments.

Never run by us: no device was at hand. What is tested is the mapping, against its documented arguments. They differ
from others': True in a mask is a key that is *not* seen, the scale is 1 unless it is given, of dropout it is told the
share that is kept, and cumulative lengths have no leading 0 and lie on the host.
"""

import functools

import torch
from torch import Tensor

from drivetrain.engine.ops.adapters.library import HALVES, hangs_on, served_by
from drivetrain.engine.ops.adapters.npu import LIBRARY
from drivetrain.engine.ops.attention.call import check_call, crosses, mask_of, softmax_scale, zeros
from drivetrain.engine.ops.attention.mask import CAUSAL, Mask
from drivetrain.engine.ops.operator import Backend
from drivetrain.engine.ops.signature import Signature
from drivetrain.errors import DrivetrainError

__all__ = ["BACKEND", "LIBRARY", "attention", "refuses", "rule", "supports"]

WIDEST = 768
MOST_HEADS = 256
MOST_TOKENS = 1_000_000
MOST_DOCUMENTS = 1024
COMPRESSED = 2048
"""Rows and columns of the mask that its modes expect, whatever the lengths are."""
ALL, TOP_LEFT, BAND = 0, 2, 4
"""``sparse_mode``: no mask, causal from the top left, and a band that starts at the bottom right."""


def refuses(mask: Mask, crosses: bool) -> str | None:
    """Why a mask is not served; None where it is."""
    if mask.prefix is not None:
        return "npu_fusion_attention has prefixes of at most 32 documents, from the bottom right: not mapped"
    if mask.slopes is not None:
        return "the sign of the ALiBi that npu_fusion_attention_v2 makes is not documented: not mapped"
    if mask.softcap is not None:
        return "npu_fusion_attention has no soft-cap"
    if mask.seeded:
        return "npu_fusion_attention draws dropout from its own generator; its seed is not ours"
    if crosses and mask.causal and mask.alignment == "bottom_right":
        return "npu_fusion_attention may not meet queries that see no key in packed documents"
    if crosses and mask.window is not None:
        return "the band of npu_fusion_attention aligns bottom_right"
    if mask.documents is not None and mask.documents.keyless:
        return "npu_fusion_attention has no documents with queries and without keys"
    return None


def rule(signature: Signature) -> str | None:
    """Why it does not compute a call, wherever it ran; None where it does."""
    q, k = signature.argument("q"), signature.argument("k")
    assert q is not None
    assert k is not None
    tokens, heads, width = q.shape
    if width > WIDEST:
        return f"heads are {width} wide; npu_fusion_attention holds at most {WIDEST}"
    if heads > MOST_HEADS:
        return f"{heads} heads; npu_fusion_attention takes {MOST_HEADS}"
    if max(tokens, k.shape[0]) > MOST_TOKENS:
        return f"{max(tokens, k.shape[0]):,} tokens; npu_fusion_attention takes {MOST_TOKENS:,}"
    return refuses(mask_of(signature), crosses(signature))


supports = served_by(LIBRARY, rule, (*HALVES, torch.float32), lambda: ("npu",))


@functools.lru_cache(maxsize=8)
def _unseen(device: torch.device) -> Tensor:
    """(2048, 2048) True above the diagonal: what is not seen."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)


# Its lengths are numbers on the host: traced, each packing would compile another graph.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL, scale: float | None = None) -> Tensor:
    """As the reference.

    Raises:
        DrivetrainError: there are more documents than it takes.
    """
    spans = [span for span in check_call(q, k, v, mask) if span.queries or span.keys]
    if not spans:
        return zeros(q, k, v)
    if len(spans) > MOST_DOCUMENTS:
        raise DrivetrainError(
            f"npu_fusion_attention takes {MOST_DOCUMENTS:,} documents; the call has {len(spans):,}. "
            "fusion.attention = chunked takes any number"
        )
    import torch_npu

    last_q, last_k = spans[-1].last_q, spans[-1].last_k
    window = mask.window
    mode = ALL if not mask.causal else TOP_LEFT if window is None else BAND
    out: Tensor = torch_npu.npu_fusion_attention(
        q[:last_q].contiguous(),
        k[:last_k].contiguous(),
        v[:last_k].contiguous(),
        q.shape[1],
        "TND",
        # Without a mask its mode is not looked at, and all keys are seen.
        atten_mask=_unseen(q.device) if mask.causal else None,
        scale=softmax_scale(q, scale),
        keep_prob=1.0 if mask.dropout is None else 1.0 - mask.dropout.probability,
        pre_tockens=2147483647 if window is None else window - 1,
        next_tockens=0 if mask.causal else 2147483647,
        actual_seq_qlen=[span.last_q for span in spans],
        actual_seq_kvlen=[span.last_k for span in spans],
        sparse_mode=mode,
    )[0]
    return torch.cat([hangs_on(out, q, k, v), torch.zeros_like(q[last_q:])])


BACKEND = Backend(
    LIBRARY.name,
    attention,
    supports,
    library=str(LIBRARY),
    kernels=("FlashAttentionScore", "FlashAttentionVarLenScore"),
)
