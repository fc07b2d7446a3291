"""FlashAttention-2 (package ``flash_attn``, Dao, arXiv:2307.08691): how our mask maps to its variable-length function.

Never run by us: no device was at hand. What is tested is the mapping, against its documented arguments.
"""

import functools
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from drivetrain.engine.ops.attention.call import check_call, crosses, mask_of, softmax_scale, zeros
from drivetrain.engine.ops.attention.mask import CAUSAL, Mask
from drivetrain.engine.ops.operator import refuse_dtypes
from drivetrain.engine.ops.signature import Signature

__all__ = ["attention", "installed", "refuses", "supports"]

WIDEST = 256


@functools.cache
def installed() -> str | None:
    """The version of the package; None where there is none."""
    try:
        return version("flash_attn")
    except PackageNotFoundError:
        return None


def refuses(mask: Mask, crosses: bool) -> str | None:
    """Why a mask is not served; None where it is."""
    if mask.prefix is not None:
        return "flash_attn has no prefix mask"
    if crosses and mask.alignment == "top_left" and (mask.causal or mask.slopes is not None):
        return "flash_attn aligns bottom_right"
    if mask.documents is not None and mask.documents.keyless:
        return "flash_attn's results for documents with queries and without keys are not documented"
    if mask.seeded:
        return "flash_attn draws dropout from its own generator; it takes no seed"
    if mask.dropout is not None and mask.softcap is not None:
        return "flash_attn has soft-cap and dropout, but not both at once"
    return None


def supports(signature: Signature) -> str | None:
    """fp16 and bf16 on a CUDA device."""
    why = refuses(mask_of(signature), crosses(signature))
    if why is not None:
        return why
    if signature.device != "cuda":
        return f"flash_attn has no {signature.device} device"
    q = signature.argument("q")
    assert q is not None
    if q.shape[2] > WIDEST:
        return f"heads are {q.shape[2]} wide; flash_attn holds at most {WIDEST}"
    why = refuse_dtypes(signature, torch.float16, torch.bfloat16)
    if why is None and installed() is None:
        return "flash_attn is not installed"
    return why


# Traced, the borders would be constants of a graph, and each packing would compile another.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL, scale: float | None = None) -> Tensor:
    """As the reference. Its backward pass is asked to be deterministic."""
    from flash_attn import flash_attn_varlen_func

    spans = [span for span in check_call(q, k, v, mask) if span.queries or span.keys]
    if not spans:
        return zeros(q, k, v)
    borders_q = torch.tensor([0, *(span.last_q for span in spans)], dtype=torch.int32)
    borders_k = torch.tensor([0, *(span.last_k for span in spans)], dtype=torch.int32)
    last_q, last_k = spans[-1].last_q, spans[-1].last_k
    out: Tensor = flash_attn_varlen_func(
        q[:last_q],
        k[:last_k],
        v[:last_k],
        cu_seqlens_q=borders_q.to(q.device),
        cu_seqlens_k=borders_k.to(q.device),
        max_seqlen_q=max(span.queries for span in spans),
        max_seqlen_k=max(span.keys for span in spans),
        dropout_p=0.0 if mask.dropout is None else mask.dropout.probability,
        softmax_scale=softmax_scale(q, scale),
        causal=mask.causal,
        window_size=(-1, -1) if mask.window is None else (mask.window - 1, 0),
        softcap=mask.softcap or 0.0,
        alibi_slopes=None if mask.slopes is None else mask.slopes.to(q.device, torch.float32),
        deterministic=True,
    )
    # Beyond the last border it leaves memory as it found it: no document, so zero, and zero gradients by the slice.
    return torch.cat([out, torch.zeros_like(q[last_q:])])
