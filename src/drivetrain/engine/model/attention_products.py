"""Causal attention in bf16 on a CPU as plain batched matrix products, with the probabilities kept for backward.

Torch's own CPU kernel (``_scaled_dot_product_flash_attention_for_cpu``) leaves the processor's bf16 dot
products unused where they are no matrix unit. On a Zen 5 core (AVX512_BF16), forward and backward of 8
sequences of 512 tokens with 4 heads of 64 take 26 ms here against 79 ms, 4 of 1024 tokens 48 against 101, one
document of 64 tokens 0.4 against 0.65; of 16 tokens 0.35 against 0.3.

Costs: the probabilities of a layer are kept in bf16 (about 1.25 x H x L bytes a token at L = 512), so long
sequences stay with torch's kernel; and scores are rounded to bf16 before the softmax, as in every eager
implementation, where a fused kernel keeps them in fp32. The softmax itself, and sums over blocks of
queries, are fp32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["LEAST_TOKENS", "MOST_TOKENS", "attention_by_products", "attention_in_words", "pays"]

LEAST_TOKENS = 32
MOST_TOKENS = 2048
"""Shortest and longest document. Twice the length is twice the memory a token; at 2048 this is still twice as fast."""
QUERIES_PER_BLOCK = 128
"""Queries that share a product. What lies above the diagonal is computed only inside a block: at 512 tokens
37% of the work is left out. 64 and 256 were slower by 10% and 4%."""


def pays(q: Tensor, documents: int) -> bool:
    """True where this was measured to be faster, by dtype, processor and length of the documents."""
    return _suits(q.dtype, q.device) and LEAST_TOKENS <= q.shape[0] // documents <= MOST_TOKENS


def _suits(dtype: torch.dtype, device: torch.device) -> bool:
    """bf16 on a CPU with bf16 dot products and no matrix unit."""
    return (
        dtype == torch.bfloat16
        and device.type == "cpu"
        and torch.cpu._is_avx512_bf16_supported()
        and not torch.cpu._is_amx_tile_supported()
    )


def attention_in_words(dtype: torch.dtype, device: torch.device, dropout: float) -> str:
    """Which attention a run computes, for its record: the two round differently."""
    if dropout == 0.0 and _suits(dtype, device):
        return f"matrix products for documents of {LEAST_TOKENS} to {MOST_TOKENS} tokens, else torch SDPA"
    return "torch SDPA"


def attention_by_products(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: int) -> Tensor:
    """softmax(q k / sqrt(K)) v inside each of ``documents`` equally long documents, causal.

    Args:
        q_THK: queries, (T, H, K).
        k_TGK, v_TGK: keys and values, (T, G, K); head h reads group h // (H / G).
        documents: they divide T into neighbours of length L.

    Returns:
        (T, H, K) in the dtype of the queries. Differentiable once.
    """
    tokens, heads, width = q_THK.shape
    groups = k_TGK.shape[1]
    # One matrix for each document and group, N of them, and in it R heads that read the same keys.
    q_NRLK = q_THK.view(documents, -1, groups, heads // groups, width).permute(0, 2, 3, 1, 4).flatten(0, 1)
    k_NLK, v_NLK = (
        x.view(documents, -1, groups, width).transpose(1, 2).flatten(0, 1) for x in (k_TGK, v_TGK)
    )
    out_NRLK: Tensor = _AttentionByProducts.apply(q_NRLK, k_NLK, v_NLK)  # type: ignore[no-untyped-call]
    out = out_NRLK.view(documents, groups, heads // groups, -1, width).permute(0, 3, 1, 2, 4)
    return out.reshape(tokens, heads, width)


class _AttentionByProducts(torch.autograd.Function):
    """Legend: N documents x groups, R heads of a group, L tokens, C queries of a block, M keys they see."""

    @staticmethod
    def forward(ctx: Any, q_NRLK: Tensor, k_NLK: Tensor, v_NLK: Tensor) -> Tensor:
        scale = q_NRLK.shape[-1] ** -0.5
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
        return torch.cat(outs, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NRLK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_NRLK, k_NLK, v_NLK, *kept = ctx.saved_tensors
        scale = q_NRLK.shape[-1] ** -0.5
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
        return torch.cat(q_grads, dim=2), k_grad_NLK.total(), v_grad_NLK.total()


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
