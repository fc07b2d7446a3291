"""Documents cut out of packed tokens, neighbours of equal lengths together: a reshape and one call for each run."""

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from drivetrain.engine.ops.attention.call import check_call
from drivetrain.engine.ops.attention.mask import Mask, Span

__all__ = ["Run", "by_documents"]

Run = Callable[[Tensor, Tensor, Tensor, list[Span], Mask, float], Tensor]
"""Attention of a run: queries, keys and values of its documents alone, these documents, the mask, the scale."""


# Traced, the borders would be constants of a graph, and each packing would compile another.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_documents(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, run: Run) -> Tensor:
    """Attention of all tokens, (Tq, H, K), by one call of ``run`` for each run of documents."""
    spans = check_call(q, k, v, mask)
    runs = [list(equal) for _, equal in groupby(spans, lambda span: (span.queries, span.keys, span.prefix))]
    if len(runs) == 1 and spans[-1].last_q == len(q) and spans[-1].last_k == len(k):
        return run(q, k, v, runs[0], mask, scale)
    # split, not slices: its backward is one concatenation instead of a zero-filled tensor per document.
    queries = torch.split(q, [*(len(one) * one[0].queries for one in runs), len(q) - spans[-1].last_q])
    keys, values = (
        torch.split(x, [*(len(one) * one[0].keys for one in runs), len(x) - spans[-1].last_k]) for x in (k, v)
    )
    pieces = zip(queries, keys, values, runs, strict=False)
    outs = [run(q_run, k_run, v_run, one, mask, scale) for q_run, k_run, v_run, one in pieces]
    return torch.cat([*outs, torch.zeros_like(queries[-1])])
