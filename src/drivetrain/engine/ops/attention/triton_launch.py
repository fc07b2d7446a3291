"""Launching the Triton kernel, and which calls it serves."""

import torch
from torch import Tensor

from drivetrain.engine.ops._triton_available import next_power_of_two, triton_refuses
from drivetrain.engine.ops.attention.call import crosses, mask_of
from drivetrain.engine.ops.attention.chunked import Rule
from drivetrain.engine.ops.attention.mask import Mask, Span
from drivetrain.engine.ops.signature import Signature

__all__ = ["forward", "refuses", "supports"]

WIDEST = 256
MOST_HEADS = 65535


def refuses(mask: Mask, _crosses: bool) -> str | None:
    """Why a mask is not served; None where it is."""
    if mask.softcap is not None:
        return "its kernel has no soft-cap"
    if mask.dropout is not None:
        return "its kernel has no dropout"
    return None


def supports(signature: Signature) -> str | None:
    """fp32, fp16 and bf16 on a CUDA device, or anywhere in triton's interpreter."""
    why = refuses(mask_of(signature), crosses(signature)) or triton_refuses(signature)
    if why is not None:
        return why
    q = signature.argument("q")
    assert q is not None
    if q.shape[2] > WIDEST:
        return f"heads are {q.shape[2]} wide; its kernel holds at most {WIDEST}"
    if q.shape[1] > MOST_HEADS:
        return f"{q.shape[1]} heads; a grid has at most {MOST_HEADS}"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, spans: list[Span], rule: Rule) -> tuple[Tensor, Tensor]:
    """Outputs (Tq, H, K) and log-sums (H, Tq), as the chunked forward returns them."""
    from drivetrain.engine.ops.attention.triton_kernel import COLUMNS, forward_kernel

    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    tokens, heads, width = q.shape
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    log = torch.full((heads, tokens), float("-inf"), dtype=torch.float32, device=q.device)
    padded = max(16, next_power_of_two(width))
    queries, keys = (64, 64) if padded <= 128 else (64, 32)
    rows = [
        (span.first_q, span.last_q, span.first_k, span.last_k, row, span.prefix)
        for span in spans
        for row in range(0, span.queries, queries)
    ]
    if not rows:
        return out, log
    table = torch.tensor(rows, dtype=torch.int32).view(-1, COLUMNS).to(q.device)
    mask = rule.mask
    slopes = None if mask.slopes is None else mask.slopes.to(q.device, torch.float32).contiguous()
    forward_kernel[(len(rows), heads)](
        q,
        k,
        v,
        out,
        log,
        slopes,
        table,
        *(stride for x in (q, k, v, out) for stride in (x.stride(0), x.stride(1))),
        log.stride(0),
        rule.scale,
        mask.window or 0,
        heads_per_group=heads // k.shape[1],
        width=width,
        padded_width=padded,
        queries=queries,
        keys=keys,
        causal=mask.causal,
        windowed=mask.window is not None,
        prefixed=mask.prefix is not None,
        bottom_right=mask.alignment == "bottom_right",
        alibi=slopes is not None,
    )
    return out, log
