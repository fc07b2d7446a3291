"""FlexAttention: one rule of tokens for every mask, and torch's compiler makes the kernel.

Documents, positions and prefixes are tensors that the rule reads, so that another packing of the same length compiles
nothing anew. On a CPU torch has its forward pass only, and not fused: good for checking the rule, not for training.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops.attention.call import check_call, crosses, mask_of, softmax_scale
from drivetrain.engine.ops.attention.mask import CAUSAL, Mask, Span
from drivetrain.engine.ops.attention.pattern import pattern_of
from drivetrain.engine.ops.operator import refuse_dtypes
from drivetrain.engine.ops.signature import Signature

__all__ = ["attention", "refuses", "supports"]


def refuses(mask: Mask, _crosses: bool) -> str | None:
    """Why a mask is not served; None where it is."""
    return "FlexAttention has no dropout" if mask.dropout is not None else None


def supports(signature: Signature) -> str | None:
    """fp32, fp16 and bf16 on a CUDA device; on a CPU where no gradient is wanted."""
    why = refuses(mask_of(signature), crosses(signature))
    if why is not None:
        return why
    if signature.device not in ("cpu", "cuda"):
        return f"FlexAttention was written for CUDA and CPU devices, not {signature.device}"
    if signature.device == "cpu" and signature.requires_grad:
        return "FlexAttention has no backward pass on a CPU"
    q, k = signature.argument("q"), signature.argument("k")
    assert q is not None
    assert k is not None
    if q.shape[0] == 0 or k.shape[0] == 0:
        return "FlexAttention takes no empty tensors"
    return refuse_dtypes(signature, torch.float32, torch.float16, torch.bfloat16)


# Traced, the borders would be constants of a graph, and each packing would compile another.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL, scale: float | None = None) -> Tensor:
    """As the reference."""
    from torch.nn.attention.flex_attention import create_block_mask

    spans = check_call(q, k, v, mask)
    table = _Table(spans, mask, len(q), len(k), q.device)
    blocks = create_block_mask(table.seen, None, None, len(q), len(k), device=q.device)
    out: Tensor = _call(q.device.type)(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        score_mod=table.score if mask.slopes is not None or mask.softcap is not None else None,
        block_mask=blocks,
        scale=softmax_scale(q, scale),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


class _Table:
    """What each token is: its document, its position there, and how many keys are its document's prefix."""

    def __init__(self, spans: list[Span], mask: Mask, queries: int, keys: int, device: torch.device) -> None:
        # Tokens after the last border: a query of document -1 meets no key, those have -2.
        of_q, at_q = torch.full((queries,), -1), torch.zeros(queries, dtype=torch.int64)
        of_k, at_k = torch.full((keys,), -2), torch.zeros(keys, dtype=torch.int64)
        prefix = torch.zeros(queries, dtype=torch.int64)
        for number, span in enumerate(spans):
            of_q[span.first_q : span.last_q] = number
            of_k[span.first_k : span.last_k] = number
            offset = pattern_of(mask, span).offset
            at_q[span.first_q : span.last_q] = torch.arange(offset, span.queries + offset)
            at_k[span.first_k : span.last_k] = torch.arange(span.keys)
            prefix[span.first_q : span.last_q] = span.prefix
        self.of_q, self.at_q, self.of_k, self.at_k = (x.to(device) for x in (of_q, at_q, of_k, at_k))
        self.prefix = prefix.to(device)
        self.slopes = None if mask.slopes is None else mask.slopes.to(device, torch.float32)
        self.seen = self._seen(mask)
        self.score = self._score(mask)

    def _seen(self, mask: Mask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        of_q, at_q, of_k, at_k, prefix = self.of_q, self.at_q, self.of_k, self.at_k, self.prefix
        causal, window, has_prefix = mask.causal, mask.window, mask.prefix is not None

        def seen(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            together = of_q[i] == of_k[j]
            if not causal:
                return together
            distance = at_q[i] - at_k[j]
            rule = distance >= 0
            if window is not None:
                rule = rule & (distance < window)
            if has_prefix:
                rule = rule | (at_k[j] < prefix[i])
            return together & rule

        return seen

    def _score(self, mask: Mask) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
        at_q, at_k, slopes, softcap = self.at_q, self.at_k, self.slopes, mask.softcap

        def score(s: Tensor, _b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
            if slopes is not None:
                s = s - slopes[h] * (at_q[i] - at_k[j]).abs()
            return s

        return score


@functools.cache
def _call(device: str) -> Callable[..., Any]:
    """FlexAttention for a device: compiled once for CUDA, as it is for a CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    if device == "cpu":

        def plain(*given: Any, **named: Any) -> Any:
            with warnings.catch_warnings():
                # It says that it is not fused, which is why this is not for training.
                warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
                return flex_attention(*given, **named)

        return plain
    compiled = torch.compile(flex_attention, dynamic=False)

    def fused(*given: Any, **named: Any) -> Any:
        # At its limit of recompilations torch would go on with the unfused form, whose memory is quadratic.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            return compiled(*given, **named)

    return fused
