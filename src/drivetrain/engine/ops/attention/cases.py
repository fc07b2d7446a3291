"""The numerics grid: every kind of mask, and shapes and values that kernels get wrong."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops.attention.mask import CAUSAL, FULL, Documents, Dropout, Mask
from drivetrain.engine.ops.operator import Case

__all__ = ["KINDS", "alibi_slopes", "cases"]

_PACKED = Documents.of_lengths([30, 1, 40, 29])
_CROSSED = Documents.of_lengths([30, 7, 0, 20], [11, 29, 5, 20])


def alibi_slopes(heads: int) -> Tensor:
    """(H,) fp32: 2^(-8/H), 2^(-16/H) … (Press et al., arXiv:2108.12409; for powers of two)."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads).float()


KINDS: dict[str, Mask] = {
    "causal": CAUSAL,
    "full": FULL,
    "prefix": Mask(prefix=20),
    "window": Mask(window=17),
    "documents": Mask(documents=_PACKED),
    "full + documents": Mask(causal=False, documents=_PACKED),
    "prefix + documents": Mask(documents=_PACKED, prefix=(5, 0, 40, 60)),
    "window + documents": Mask(documents=_PACKED, window=9),
    "alibi": Mask(slopes=alibi_slopes(4)),
    "alibi + documents": Mask(documents=_PACKED, slopes=alibi_slopes(4)),
    "alibi + full": Mask(causal=False, slopes=alibi_slopes(4)),
    "soft-cap": Mask(softcap=2.0),
    "dropout, seeded": Mask(dropout=Dropout(0.17, seed=11)),
    "dropout": Mask(dropout=Dropout(0.17)),
    "cross lengths, top left": Mask(documents=_CROSSED, alignment="top_left"),
    "cross lengths, bottom right": Mask(documents=_CROSSED, alignment="bottom_right"),
    "cross lengths, full": Mask(causal=False, documents=_CROSSED),
    "documents without keys": Mask(causal=False, documents=Documents.of_lengths([30, 7, 20], [11, 0, 40])),
}
"""One of each, as the matrix of the page shows them. Slopes are of 4 heads."""


def _call(
    mask: Mask,
    queries: int = 100,
    keys: int | None = None,
    heads: int = 4,
    groups: int = 2,
    width: int = 16,
    scale: float | None = None,
    larger: float = 1.0,
    layout: Callable[[Tensor], Tensor] = lambda x: x,
    wanted: str = "qkv",
) -> Callable[[torch.dtype, torch.Generator], dict[str, Any]]:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        def drawn(tokens: int, rows: int, size: float) -> Tensor:
            tensor = torch.randn(tokens, rows, width, generator=generator) * size
            return layout(tensor.to(dtype)).detach()

        tokens = queries if keys is None else keys
        # Queries and keys of different sizes: who reads one for the other shows.
        q, k = drawn(queries, heads, 1.5 * larger), drawn(tokens, groups, 0.7 * larger)
        tensors = {"q": q, "k": k, "v": drawn(tokens, groups, 1.0)}
        for name, tensor in tensors.items():
            tensor.requires_grad_(name in wanted)
        return {**tensors, "mask": mask, "scale": scale}

    return make


def _gaps(x: Tensor) -> Tensor:
    """The same values with strides that leave gaps."""
    return torch.cat([x, x.new_zeros(x.shape)], dim=-1)[..., : x.shape[-1]]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _every_other(x: Tensor) -> Tensor:
    """The last dimension itself has gaps."""
    return torch.stack([x, torch.zeros_like(x)], dim=-1)[..., 0]


def cases() -> Iterable[Case]:
    """The calls, those of every kind of mask first."""
    for name, mask in KINDS.items():
        if mask.dropout is not None and mask.dropout.seed is None:
            continue
        queries, keys = 100, 100
        if mask.documents is not None:
            queries, keys = int(mask.documents.cu_seqlens_q[-1]), int(mask.documents.cu_seqlens_k[-1])
        yield Case(name, _call(mask, queries, keys))
    # Where a query sees one key, the gradients of queries and keys are 0: a difference of equal terms, whose rounding
    # has nothing to be relative to. A test of its own bounds it.
    yield Case("one token", _call(CAUSAL, 1, wanted="v"))
    yield Case("two tokens", _call(CAUSAL, 2))
    yield Case("several blocks", _call(Mask(window=300), 600, heads=2, groups=1))
    yield Case(
        "several blocks, bottom right", _call(Mask(alignment="bottom_right"), 260, 560, heads=2, groups=1)
    )
    yield Case("a tail of no document", _call(Mask(documents=Documents([0, 40, 40, 75])), 100))
    equal = Mask(documents=Documents.of_lengths([20, 20, 20]), prefix=(3, 3, 11))
    yield Case("equal documents with other prefixes", _call(equal, 60))
    yield Case("one query at the end", _call(Mask(alignment="bottom_right"), 1, 70))
    yield Case("more queries than keys", _call(Mask(alignment="bottom_right"), 70, 12))
    yield Case("window of one", _call(Mask(window=1), 50, wanted="v"))
    yield Case("window of the length", _call(Mask(window=50), 50))
    for heads, groups in ((1, 1), (3, 1), (7, 7), (8, 1)):
        yield Case(f"{heads} heads, {groups} groups", _call(CAUSAL, 33, heads=heads, groups=groups))
    for width in (1, 13, 40, 59, 72, 96, 104, 111, 128, 192):
        yield Case(f"width {width}", _call(Mask(documents=Documents.of_lengths([20, 17])), 37, width=width))
    yield Case(
        "alibi, slopes that are no powers of two", _call(Mask(slopes=alibi_slopes(7)), 300, heads=7, groups=7)
    )
    yield Case("scale", _call(CAUSAL, 40, scale=0.3))
    yield Case("large scores", _call(CAUSAL, 60, larger=6.0))
    yield Case("zero scores", _call(CAUSAL, 60, larger=0.0))
    yield Case("strides with gaps", _call(CAUSAL, 40, layout=_gaps))
    yield Case(
        "heads before tokens in memory",
        _call(Mask(documents=Documents.of_lengths([25, 15])), 40, layout=_heads_first),
    )
    yield Case("features with gaps", _call(CAUSAL, 40, layout=_every_other))
