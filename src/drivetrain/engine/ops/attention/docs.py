"""``docs/ops-attention.md``: the page on attention, its matrix generated from the backends' own rules.

``python -m drivetrain.engine.ops.attention.docs`` writes it; a test keeps it fresh.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from drivetrain.engine.ops.attention import (
    OPERATOR,
    eager,
    flash_attn,
    flex,
    npu,
    products,
    transformer_engine,
    triton_launch,
)
from drivetrain.engine.ops.attention.cases import KINDS
from drivetrain.engine.ops.attention.mask import Mask

__all__ = ["PATH", "RULES", "crosses_of", "render"]

PATH = Path("docs") / "ops-attention.md"
"""Where the page lies in the repository."""


def _every_mask(_mask: Mask, _crosses: bool) -> str | None:
    return None


RULES: dict[str, Callable[[Mask, bool], str | None]] = {
    "eager": eager.refuses,
    "products": products.refuses,
    "dense": _every_mask,
    "chunked": _every_mask,
    "flex": flex.refuses,
    "triton": triton_launch.refuses,
    "flash_attn": flash_attn.refuses,
    "transformer_engine": transformer_engine.refuses,
    "npu": npu.refuses,
}
"""Why a backend refuses a mask, given that and whether lengths of queries and keys differ; None where it serves it."""


def crosses_of(mask: Mask) -> bool:
    """Whether the mask's own documents have not as many keys as queries."""
    return mask.documents is not None and mask.documents.crosses


def render() -> str:
    """The text of the page."""
    notes: dict[str, int] = {}
    lines = [
        "| mask | " + " | ".join(f"`{name}`" for name in RULES) + " |",
        "|---" * (len(RULES) + 1) + "|",
    ]
    for kind, mask in KINDS.items():
        cells = []
        for rule in RULES.values():
            why = rule(mask, crosses_of(mask))
            cells.append("yes" if why is None else f"no ({notes.setdefault(why, len(notes) + 1)})")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {why}." for why, number in notes.items()), ""]
    ran = [
        f"| `{one.name}` | {_WHAT[one.name]} | {', '.join(one.ran_on) or 'never'} | {_MEMORY[one.name]} |"
        for one in OPERATOR.backends
    ]
    backends = [
        "| backend | what it is | ran on | memory of a document of L tokens |",
        "|---|---|---|---|",
        *ran,
        "",
    ]
    return _PAGE.format(matrix="\n".join(lines), backends="\n".join(backends), factor=f"{OPERATOR.factor:g}")


_WHAT = {
    "eager": "torch's SDPA, document by document",
    "products": "plain products in blocks of queries, in bf16 on CPUs with bf16 dot products; SDPA for documents too "
    "short or too long to gain",
    "dense": "plain softmax; the reference",
    "chunked": "blocks of keys with a running softmax, in plain torch",
    "flex": "FlexAttention; on a CPU its forward pass only, not fused",
    "triton": "our kernel for the forward pass, the chunked backward pass; in tests run by triton's interpreter",
    "flash_attn": "FlashAttention-2",
    "transformer_engine": "Transformer Engine; which of its kernels serves is its choice",
    "npu": "Ascend's `npu_fusion_attention`",
}

_MEMORY = {
    "eager": "L; L × W under a window; L² for other masks than causal and full, and with dropout on a CPU",
    "products": "H L² for documents that gain, of at most 2,048 tokens; L for others",
    "dense": "H L²",
    "chunked": "L",
    "flex": "L on CUDA; H L² on a CPU",
    "triton": "L",
    "flash_attn": "L",
    "transformer_engine": "L; H L² where it has nothing fused",
    "npu": "L",
}

_PAGE = """\
# Attention

This page is generated: `python -m drivetrain.engine.ops.attention.docs` writes it.

Attention is an operator over a mask that is *specified*. Nothing is inferred from position ids or from a padding mask:
document borders are given as cumulative lengths, and where a document has not as many keys as queries, how they are
aligned is stated.

```python
import torch
from drivetrain.engine.ops.attention import Documents, Mask
from drivetrain.engine.ops.modules_attention import Attention

attention = Attention(hidden_size=64, num_attention_heads=4, num_query_groups=2)
out = attention(torch.randn(100, 64), Mask(window=32, documents=Documents.of_lengths([30, 1, 40, 29])))
```

With scale s, cap c and slope m, query i at position p scores c·tanh(s q·k / c) − m·|p − j| for key j; the weights are
its softmax over the keys that it sees.

* Positions count from 0 in each document. p is i (`top_left`, as torch's SDPA), or i + M − L in a document of L queries
  and M keys (`bottom_right`, as flash-attn).
* A window counts the keys that are seen, the query's own included: p − j < W. A window of 1 sees itself; one of at
  least the length is the causal mask.
* The keys of a prefix are seen by all queries of the document. Prefix and window exclude each other.
* A query that sees no key gives 0, and all gradients it would send are 0. So are outputs and gradients of tokens
  behind the last border.
* Dropout with a seed drops the same weights in every backend that serves it, in every blocking, and in a recomputed
  forward pass: which are dropped is a function of seed, head, query and key. Without one the backend draws.
* Slopes are constants; slopes that require a gradient are refused.
* Numbers of heads and of key groups are read off the tensors, (Tq, H, K) and (Tk, G, K); all backends take fewer
  groups than heads. A batch is documents of equal lengths.

## Who serves which mask

A backend that was asked for and cannot serve raises, and names those that can (`fusion.allow_fallback` lets `eager` go
on, with the reason recorded). A backend may refuse a call for other reasons as well: its dtype, its device, a width of
heads.

{matrix}
## Backends

{backends}
Each is held to {factor} times the error against float64 that the dense softmax makes in the same dtype, outputs and
gradients; what has not run on a device is graded on none. In bf16 and fp16 `eager` has ALiBi under a causal mask as
columns of queries and keys, without a bias of the size of the scores; in fp32 the sums of such columns lose digits, and
it adds a bias.

On a CPU each length of a document costs code that is generated for it, in bf16, by `products` and, with a matrix unit,
by `eager`: under a causal mask both lengthen documents to one of 40 lengths up to 2,048 tokens, by a 22nd on average.
They then keep copies of queries, keys and values for the backward pass where they would have kept none of their own.

Compiled code (`torch.compile`) calls `chunked` and `triton` without breaking its graph, and another packing compiles
nothing. It has `eager` and `dense` in its graph where the mask has no documents. Elsewhere the graph breaks, as borders
that the host reads would otherwise be its constants.
"""


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PATH
    path.write_text(render(), encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)
