"""Causal attention in bf16 on a CPU as plain batched matrix products, with the probabilities kept for backward.

Torch's own CPU kernel (``_scaled_dot_product_flash_attention_for_cpu``) leaves the processor's bf16 dot
products unused where they are no matrix unit. On a Zen 5 core (AVX512_BF16), forward and backward of 8
sequences of 512 tokens with 4 heads of 64 take 26 ms here against 79 ms, 4 of 1024 tokens 48 against 101, one
document of 64 tokens 0.4 against 0.65; of 16 tokens 0.35 against 0.3.
On a Xeon core with a matrix unit (AMX), which torch's kernel uses, it is CPU time of 41 ms against 51 for 8 sequences
of 512 tokens, 29 against 41 for 16 of 256, 12 against 47 for 64 of 64; of 768 tokens both take the same, and 4 of 1024
take 67 against 61.

Costs: the probabilities of a layer are kept in bf16 (about 1.25 x H x L bytes a token at L = 512), so long
sequences stay with torch's kernel; and scores are rounded to bf16 before the softmax, as in every eager
implementation, where a fused kernel keeps them in fp32. The softmax itself, and sums over blocks of
queries, are fp32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.engine.ops.attention import eager
from drivetrain.engine.ops.attention.call import crosses, mask_of, softmax_scale, zeros
from drivetrain.engine.ops.attention.mask import CAUSAL, Mask, Span
from drivetrain.engine.ops.attention.padding import frequent_length, padded
from drivetrain.engine.ops.attention.runs import by_documents
from drivetrain.engine.ops.operator import refuse_dtypes
from drivetrain.engine.ops.signature import Signature

__all__ = [
    "LEAST_TOKENS",
    "MOST_TOKENS",
    "MOST_TOKENS_WITH_MATRIX_UNIT",
    "attention",
    "attention_by_products",
    "attention_in_words",
    "pays",
    "refuses",
    "run",
    "supports",
]

LEAST_TOKENS = 32
MOST_TOKENS = 2048
"""Shortest and longest document. Twice the length is twice the memory a token; at 2048 this is still twice as fast."""
MOST_TOKENS_WITH_MATRIX_UNIT = 512
"""The longest where the processor has one: torch's kernel is the quicker from 1024 on."""
QUERIES_PER_BLOCK = 128
"""Queries that share a product. What lies above the diagonal is computed only inside a block: at 512 tokens
37% of the work is left out. 64 and 256 were slower by 10% and 4%."""


def pays(q: Tensor, documents: int) -> bool:
    """True where this was measured to be faster, by dtype, processor and length of the documents."""
    return _suits(q.dtype, q.device) and LEAST_TOKENS <= q.shape[0] // documents <= _most_tokens()


def _suits(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.bfloat16 and device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def _most_tokens() -> int:
    return MOST_TOKENS_WITH_MATRIX_UNIT if torch.cpu._is_amx_tile_supported() else MOST_TOKENS


def attention_in_words(dtype: torch.dtype, device: torch.device, dropout: float) -> str:
    """Which attention a run computes, for its record: the two round differently."""
    if dropout == 0.0 and _suits(dtype, device):
        return f"matrix products for documents of {LEAST_TOKENS} to {_most_tokens()} tokens, else torch SDPA"
    return "torch SDPA"


def refuses(mask: Mask, crosses: bool) -> str | None:
    """Why a mask is not served; None where it is."""
    others = {
        "full mask": not mask.causal,
        "prefix": mask.prefix is not None,
        "window": mask.window is not None,
        "ALiBi": mask.slopes is not None,
        "soft-cap": mask.softcap is not None,
        "dropout": mask.dropout is not None,
        "lengths that differ between queries and keys": crosses,
    }
    return next((f"the matrix products have no {what}" for what, there in others.items() if there), None)


def supports(signature: Signature) -> str | None:
    """bf16 on a CPU that has bf16 dot products. Of packed documents those of other lengths are SDPA's."""
    why = refuses(mask_of(signature), crosses(signature))
    if why is not None:
        return why
    if signature.device != "cpu":
        return f"the matrix products were written for CPUs, not {signature.device}"
    why = refuse_dtypes(signature, torch.bfloat16)
    if why is not None:
        return why
    if not torch.cpu._is_avx512_bf16_supported():
        return "this processor has no bf16 dot products, without which SDPA is faster"
    q = signature.argument("q")
    assert q is not None
    tokens, most = q.shape[0], _most_tokens()
    if mask_of(signature).documents is None and not LEAST_TOKENS <= tokens <= most:
        return (
            f"one document of {tokens} tokens: matrix products were measured to be faster than SDPA from "
            f"{LEAST_TOKENS} to {most} on this processor"
        )
    return None


# The processor is asked for each call, and an autograd.Function of its own: nothing to trace.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL, scale: float | None = None) -> Tensor:
    """As the reference, for causal masks: by products where they were measured to pay, else by SDPA."""
    out: Tensor = by_documents(q, k, v, mask, softmax_scale(q, scale), _run_as_pays)
    return out


def _run_as_pays(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, spans: list[Span], mask: Mask, scale: float
) -> Tensor:
    computing = run if pays(q_THK, len(spans)) else eager.run
    return computing(q_THK, k_TGK, v_TGK, spans, mask, scale)


def run(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, spans: list[Span], _mask: Mask, scale: float) -> Tensor:
    """By products whatever they cost. ``spans``: documents of equal lengths, the only ones among these tokens."""
    if spans[0].queries == 0:
        return zeros(q_THK, k_TGK, v_TGK)
    return attention_by_products(q_THK, k_TGK, v_TGK, len(spans), scale)


def attention_by_products(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: int, scale: float | None = None
) -> Tensor:
    """softmax(scale q k) v inside each of ``documents`` equally long documents, causal.

    Args:
        q_THK: queries, (T, H, K).
        k_TGK, v_TGK: keys and values, (T, G, K); head h reads group h // (H / G).
        documents: they divide T into neighbours of length L.
        scale: of the products; None is 1/sqrt(K).

    Returns:
        (T, H, K) in the dtype of the queries. Differentiable once.
    """
    tokens, heads, width = q_THK.shape
    groups, length = k_TGK.shape[1], tokens // documents
    # Documents here, tokens of each, heads or groups, width.
    q, k, v = (
        padded(x.unflatten(0, (documents, length)), frequent_length(length)) for x in (q_THK, k_TGK, v_TGK)
    )
    # One matrix for each document and group, N of them, and in it R heads that read the same keys.
    q_NRLK = q.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    k_NLK, v_NLK = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
    out_NRLK: Tensor = _AttentionByProducts.apply(  # type: ignore[no-untyped-call]
        q_NRLK, k_NLK, v_NLK, softmax_scale(q_THK, scale)
    )
    out = out_NRLK.view(documents, groups, heads // groups, -1, width).permute(0, 3, 1, 2, 4)
    return out[:, :length].reshape(tokens, heads, width)


class _AttentionByProducts(torch.autograd.Function):
    """Legend: N documents x groups, R heads of a group, L tokens, C queries of a block, M keys they see."""

    @staticmethod
    def forward(ctx: Any, q_NRLK: Tensor, k_NLK: Tensor, v_NLK: Tensor, scale: float) -> Tensor:
        outs, kept = [], []
        above_CC = torch.ones(QUERIES_PER_BLOCK, QUERIES_PER_BLOCK, dtype=torch.bool).triu_(1)
        mask_CC = torch.zeros(above_CC.shape, dtype=q_NRLK.dtype).masked_fill_(above_CC, float("-inf"))
        for first, q_NRCK in _blocks(q_NRLK):
            rows = q_NRCK.shape[2]
            last = first + rows
            scores_NXM = _scaled_product(q_NRCK.flatten(1, 2), k_NLK[:, :last].transpose(1, 2), scale)
            scores_NRCM = scores_NXM.unflatten(1, (-1, rows))
            scores_NRCM[..., first:] += mask_CC[:rows, :rows]
            weights_NXM = torch.softmax(scores_NXM, dim=-1)
            outs.append(torch.bmm(weights_NXM, v_NLK[:, :last]).unflatten(1, (-1, rows)))
            kept.append(weights_NXM)
        ctx.save_for_backward(q_NRLK, k_NLK, v_NLK, *kept)
        ctx.scale = scale
        return torch.cat(outs, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NRLK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_NRLK, k_NLK, v_NLK, *kept = ctx.saved_tensors
        scale = ctx.scale
        q_grads = []
        k_grad_NLK, v_grad_NLK = _Sum(k_NLK), _Sum(v_NLK)
        for (first, q_NRCK), weights_NXM in zip(_blocks(q_NRLK), kept, strict=True):
            rows, last = q_NRCK.shape[2], weights_NXM.shape[2]
            q_NXK = q_NRCK.flatten(1, 2)
            gradient_NXK = gradient_NRLK[:, :, first:last].flatten(1, 2)
            v_grad_NLK.add(torch.bmm(weights_NXM.transpose(1, 2), gradient_NXK))
            of_weights_NXM = torch.bmm(gradient_NXK, v_NLK[:, :last].transpose(1, 2))
            of_scores_NXM = torch._softmax_backward_data(of_weights_NXM, weights_NXM, -1, weights_NXM.dtype)
            q_grads.append(_scaled_product(of_scores_NXM, k_NLK[:, :last], scale).unflatten(1, (-1, rows)))
            k_grad_NLK.add(_scaled_product(of_scores_NXM.transpose(1, 2), q_NXK, scale))
        return torch.cat(q_grads, dim=2), k_grad_NLK.total(), v_grad_NLK.total(), None


def _blocks(q_NRLK: Tensor) -> list[tuple[int, Tensor]]:
    """Blocks of queries with the number of their first token."""
    return [
        (index * QUERIES_PER_BLOCK, block)
        for index, block in enumerate(torch.split(q_NRLK, QUERIES_PER_BLOCK, dim=2))
    ]


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``scale * a @ b``, batched; scaled in fp32 inside the product, before the result is rounded."""
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)


class _Sum:
    """Parts of a gradient, each of the first M tokens, added up in fp32."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None

    def add(self, part_NMK: Tensor) -> None:
        """Add one part."""
        if self._total is None and part_NMK.shape == self._like.shape:
            self._total = part_NMK
            return
        if self._total is None:
            self._total = torch.zeros(self._like.shape, dtype=torch.float32, device=self._like.device)
        self._total[:, : part_NMK.shape[1]] += part_NMK

    def total(self) -> Tensor:
        """The sum in the dtype of what it is the gradient of."""
        assert self._total is not None
        return self._total.to(self._like.dtype)
