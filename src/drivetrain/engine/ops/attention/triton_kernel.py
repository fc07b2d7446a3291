"""The forward kernel. Imports triton, so only ``triton_launch`` imports it, inside a function.

One program computes a block of queries of one head of one document; a table says which. It reads keys of that document
only, so what is next to it in memory cannot reach it, not even as not-a-number times zero. Written so that triton's
interpreter runs it: loads are cast before any arithmetic in bf16, program ids are int64 before they meet a stride.
"""

import triton
import triton.language as tl

__all__ = ["COLUMNS", "forward_kernel"]

COLUMNS = 6
"""Of the table, int32: first query, end of queries, first key, end of keys, the block's first row, prefix length."""


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
    log,
    slopes,
    table,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    log_head,
    scale,
    window,
    heads_per_group: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    queries: tl.constexpr,
    keys: tl.constexpr,
    causal: tl.constexpr,
    windowed: tl.constexpr,
    prefixed: tl.constexpr,
    bottom_right: tl.constexpr,
    alibi: tl.constexpr,
):
    entry = table + tl.program_id(0).to(tl.int64) * 6
    head = tl.program_id(1).to(tl.int64)
    first_q = tl.load(entry).to(tl.int64)
    length_q = tl.load(entry + 1).to(tl.int64) - first_q
    first_k = tl.load(entry + 2).to(tl.int64)
    length_k = tl.load(entry + 3).to(tl.int64) - first_k
    first_row = tl.load(entry + 4).to(tl.int64)
    prefix = tl.load(entry + 5).to(tl.int64)
    offset = first_row * 0
    if bottom_right:
        offset = length_k - length_q

    rows = first_row + tl.arange(0, queries)
    features = tl.arange(0, padded_width)
    is_row = (rows < length_q)[:, None] & (features < width)[None, :]
    q_at = q + head * q_head + (first_q + rows)[:, None] * q_token + features[None, :]
    q_block = tl.load(q_at, mask=is_row, other=0.0)
    positions = rows + offset

    low = first_row * 0
    high = length_k
    if causal:
        high = first_row + queries + offset
        if prefixed:
            high = tl.maximum(high, prefix)
        high = tl.minimum(high, length_k)
    if windowed:
        low = tl.maximum(first_row + offset - window + 1, 0) // keys * keys
    group = head // heads_per_group
    k_of_group = k + group * k_head + first_k * k_token
    v_of_group = v + group * v_head + first_k * v_token
    if alibi:
        slope = tl.load(slopes + head)

    most = tl.full([queries], float("-inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    weighted = tl.zeros([queries, padded_width], tl.float32)
    for start in range(low, high, keys):
        columns = start + tl.arange(0, keys).to(tl.int64)
        is_key = columns < length_k
        is_key_feature = is_key[:, None] & (features < width)[None, :]
        k_block = tl.load(
            k_of_group + columns[:, None] * k_token + features[None, :], mask=is_key_feature, other=0.0
        )
        scores = tl.dot(q_block, tl.trans(k_block), input_precision="ieee") * scale
        distance = positions[:, None] - columns[None, :]
        if alibi:
            scores -= slope * tl.abs(distance).to(tl.float32)
        seen = is_key[None, :]
        if causal:
            by_position = distance >= 0
            if windowed:
                by_position = by_position & (distance < window)
            if prefixed:
                by_position = by_position | (columns < prefix)[None, :]
            seen = seen & by_position
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - finite[:, None])
        shrunk = tl.exp(most - finite)
        total = total * shrunk + tl.sum(weights, 1)
        v_block = tl.load(
            v_of_group + columns[:, None] * v_token + features[None, :], mask=is_key_feature, other=0.0
        )
        weighted = weighted * shrunk[:, None]
        weighted += tl.dot(weights.to(v_block.dtype), v_block, input_precision="ieee")
        most = higher

    nothing = total == 0.0
    divisor = tl.where(nothing, 1.0, total)
    out_at = out + head * out_head + (first_q + rows)[:, None] * out_token + features[None, :]
    tl.store(out_at, (weighted / divisor[:, None]).to(out.dtype.element_ty), mask=is_row)
    log_of_rows = tl.where(nothing, float("-inf"), most + tl.log(divisor))
    tl.store(log + head * log_head + first_q + rows, log_of_rows, mask=rows < length_q)
