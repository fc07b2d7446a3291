"""Attention over blocks of keys with a running softmax: memory linear in the length, every mask, an exact backward.

The running maximum and sum are those of Milakov and Gimelshein (arXiv:1805.02867); the backward pass computes each
block of weights again from the kept log-sum of its row (Dao et al., arXiv:2205.14135). Blocks that no query of a block
can see are skipped. Plain torch, for any device and for fp64; products are in the dtype of the inputs, sums over blocks
in fp32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain.engine.ops.attention.dropout import kept
from drivetrain.engine.ops.attention.mask import Mask, Span
from drivetrain.engine.ops.attention.pattern import Pattern, pattern_of

__all__ = ["KEYS", "QUERIES", "Rule", "backward", "forward"]

QUERIES = 256
KEYS = 512
"""Block sizes. A block of scores is H x 256 x 512 in fp32: 4 MiB for 8 heads."""


class Rule(NamedTuple):
    """What the scores are made of besides products.

    Attributes:
        mask: the specification; dropout's seed is ``seed``.
        seed: of dropout.
        scale: of the products.
        wide: whether the products of queries and keys are fp32 for low dtypes, too. The log-sums of a kernel that keeps
            them so do not fit scores that were rounded: at scores of 50 bf16 is off by an eighth, weights by as much.
    """

    mask: Mask
    seed: int
    scale: float
    wide: bool = False


class _Block(NamedTuple):
    """A block of scores: numbers of queries and keys in their document, and the same among all tokens."""

    rows: range
    columns: range
    rows_of_all: range
    columns_of_all: range


def forward(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, spans: list[Span], rule: Rule
) -> tuple[Tensor, Tensor]:
    """Outputs, (Tq, H, K), and the log of the sum of exponentials of each row, (H, Tq), -inf where nothing is seen."""
    sums = torch.promote_types(q_THK.dtype, torch.float32)
    out_THK = torch.zeros(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
    log_HT = torch.full((q_THK.shape[1], len(q_THK)), float("-inf"), dtype=sums, device=q_THK.device)
    groups = k_TGK.shape[1]
    for span in spans:
        pattern = pattern_of(rule.mask, span)
        for rows in _blocks(range(span.queries), QUERIES):
            of_all = range(span.first_q + rows.start, span.first_q + rows.stop)
            q_GRCK = _grouped(q_THK[of_all.start : of_all.stop], groups)
            most = torch.full(q_GRCK.shape[:3], float("-inf"), dtype=sums, device=q_THK.device)
            total = torch.zeros_like(most)
            sum_GRCK = torch.zeros(q_GRCK.shape, dtype=sums, device=q_THK.device)
            for block in _seen(rows, pattern, span):
                k_GMK, v_GMK = (_of_block(x, block) for x in (k_TGK, v_TGK))
                scores, _ = _scores(q_GRCK, k_GMK, block, pattern, rule)
                higher = torch.maximum(most, scores.amax(dim=-1))
                # A row that has seen nothing yet: exp(-inf - 0) is 0, exp(-inf + inf) would be nan.
                finite = torch.where(higher == float("-inf"), 0.0, higher)
                weights = torch.exp(scores - finite[..., None])
                shrunk = torch.exp(most - finite)
                total = total * shrunk + weights.sum(dim=-1)
                weights = _dropped(weights, block, rule)
                sum_GRCK = sum_GRCK * shrunk[..., None] + _product(weights.to(v_TGK.dtype), v_GMK)
                most = higher
            nothing = total == 0.0
            divided = sum_GRCK / torch.where(nothing, 1.0, total)[..., None]
            out_THK[of_all.start : of_all.stop] = divided.permute(2, 0, 1, 3).flatten(1, 2).to(q_THK.dtype)
            log = torch.where(nothing, float("-inf"), most + total.log())
            log_HT[:, of_all.start : of_all.stop] = log.flatten(0, 1)
    return out_THK, log_HT


def backward(
    gradient_THK: Tensor,
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    out_THK: Tensor,
    log_HT: Tensor,
    spans: list[Span],
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    sums, groups = log_HT.dtype, k_TGK.shape[1]
    of_q, of_k, of_v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q_THK, k_TGK, v_TGK))
    for span in spans:
        pattern = pattern_of(rule.mask, span)
        of_k_GMK, of_v_GMK = (
            torch.zeros(groups, span.keys, x.shape[2], dtype=sums, device=x.device) for x in (k_TGK, v_TGK)
        )
        for rows in _blocks(range(span.queries), QUERIES):
            cut = slice(span.first_q + rows.start, span.first_q + rows.stop)
            q, gradient, out = (_grouped(x[cut], groups) for x in (q_THK, gradient_THK, out_THK))
            log = log_HT[:, cut].unflatten(0, (groups, -1))[..., None]
            log = torch.where(log == float("-inf"), 0.0, log)
            # The sum over keys of weight times its gradient, dropout or not.
            common = (gradient.to(sums) * out.to(sums)).sum(dim=-1, keepdim=True)
            of_rows = torch.zeros(q.shape, dtype=sums, device=q.device)
            for block in _seen(rows, pattern, span):
                k_GMK, v_GMK = (_of_block(x, block) for x in (k_TGK, v_TGK))
                scores, slope = _scores(q, k_GMK, block, pattern, rule)
                weights = torch.exp(scores - log)
                into = slice(block.columns.start, block.columns.stop)
                of_v_GMK[:, into] += _product_of_rows(
                    _dropped(weights, block, rule).to(v_TGK.dtype), gradient
                )
                of_weights = _dropped(_product(gradient, v_GMK.transpose(1, 2)).to(sums), block, rule)
                of_scores = weights * (of_weights - common)
                if slope is not None:
                    of_scores = of_scores * slope
                of_scores = of_scores.to(q.dtype)
                of_rows += _product(of_scores, k_GMK)
                of_k_GMK[:, into] += _product_of_rows(of_scores, q)
            of_q[cut] = (of_rows * rule.scale).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
        keys = slice(span.first_k, span.last_k)
        of_k[keys] = (of_k_GMK * rule.scale).transpose(0, 1).to(k_TGK.dtype)
        of_v[keys] = of_v_GMK.transpose(0, 1).to(v_TGK.dtype)
    return of_q, of_k, of_v


def _blocks(numbers: range, size: int) -> Iterator[range]:
    for first in range(numbers.start, numbers.stop, size):
        yield range(first, min(first + size, numbers.stop))


def _seen(rows: range, pattern: Pattern, span: Span) -> Iterator[_Block]:
    rows_of_all = range(span.first_q + rows.start, span.first_q + rows.stop)
    for columns in _blocks(pattern.keys(rows, span.keys), KEYS):
        yield _Block(
            rows, columns, rows_of_all, range(span.first_k + columns.start, span.first_k + columns.stop)
        )


def _grouped(x_CHK: Tensor, groups: int) -> Tensor:
    """(C, H, K) to (groups, heads of a group, C, K)."""
    grouped: Tensor = x_CHK.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)
    return grouped


def _of_block(x_TGK: Tensor, block: _Block) -> Tensor:
    return x_TGK[block.columns_of_all.start : block.columns_of_all.stop].transpose(0, 1)


def _product(rows_GRCX: Tensor, x_GXY: Tensor) -> Tensor:
    """(G, R, C, X) times (G, X, Y), one product for a group."""
    product: Tensor = (rows_GRCX.flatten(1, 2) @ x_GXY).unflatten(1, rows_GRCX.shape[1:3])
    return product


def _product_of_rows(weights_GRCM: Tensor, x_GRCK: Tensor) -> Tensor:
    """(G, M, K): summed over the queries of all heads of a group."""
    product: Tensor = weights_GRCM.flatten(1, 2).transpose(1, 2) @ x_GRCK.flatten(1, 2)
    return product


def _scores(
    q_GRCK: Tensor, k_GMK: Tensor, block: _Block, pattern: Pattern, rule: Rule
) -> tuple[Tensor, Tensor | None]:
    """(G, R, C, M), -inf where a key is not seen; and their derivative by the scaled product, None where it is 1."""
    mask, device = rule.mask, q_GRCK.device
    sums = torch.promote_types(q_GRCK.dtype, torch.float32)
    if rule.wide:
        q_GRCK, k_GMK = q_GRCK.to(sums), k_GMK.to(sums)
    scores = (_product(q_GRCK, k_GMK.transpose(1, 2)) * rule.scale).to(sums)
    slope = None
    if mask.softcap is not None:
        bent = torch.tanh(scores / mask.softcap)
        scores, slope = mask.softcap * bent, 1.0 - bent * bent
    if mask.slopes is not None:
        distance = pattern.distance(block.rows, block.columns, device).abs()
        slopes = mask.slopes.to(device, scores.dtype).view(*scores.shape[:2], 1, 1)
        scores = scores - slopes * distance
    seen = pattern.allowed(block.rows, block.columns, device)
    return (scores if seen is None else scores.masked_fill(~seen, float("-inf"))), slope


def _dropped(weights_GRCM: Tensor, block: _Block, rule: Rule) -> Tensor:
    """Weights, or their gradients, after dropout."""
    if rule.mask.dropout is None:
        return weights_GRCM
    probability = rule.mask.dropout.probability
    heads = weights_GRCM.shape[0] * weights_GRCM.shape[1]
    keep = kept(rule.seed, probability, heads, block.rows_of_all, block.columns_of_all, weights_GRCM.device)
    return torch.where(keep.view(weights_GRCM.shape), weights_GRCM / (1.0 - probability), 0.0)
