"""The Triton kernel of ``rotary``. Import this module in functions alone: Triton is optional."""

import triton
import triton.language as tl

__all__ = ["rotary_kernel"]


@triton.jit
def rotary_kernel(
    x_pointer,
    cosine_pointer,
    sine_pointer,
    out_pointer,
    rows,
    heads,
    size,
    half,
    token_stride,
    head_stride,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Turn ROWS heads; out is contiguous, angles are (tokens, half). The gradient is the turn back (INVERSE).

    HALF and REST are powers of two that hold the pairs and the features that go through; columns behind are masked.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // heads
    source = (token * token_stride + (row - token * heads) * head_stride)[:, None]
    target = (row * size)[:, None]
    pair = tl.arange(0, HALF)
    if INTERLEAVED:
        first = (2 * pair)[None, :]
        second = first + 1
    else:
        first = pair[None, :]
        second = first + half
    inside = (row < rows)[:, None] & (pair < half)[None, :]
    angle = (token * half)[:, None] + pair[None, :]
    cosine = tl.load(cosine_pointer + angle, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sine_pointer + angle, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        sine = -sine
    a = tl.load(x_pointer + source + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_pointer + source + second, mask=inside, other=0.0).to(tl.float32)
    kind = out_pointer.dtype.element_ty
    tl.store(out_pointer + target + first, (a * cosine - b * sine).to(kind), mask=inside)
    tl.store(out_pointer + target + second, (b * cosine + a * sine).to(kind), mask=inside)
    if REST > 0:
        column = (2 * half + tl.arange(0, REST))[None, :]
        beside = (row < rows)[:, None] & (column < size)
        tl.store(
            out_pointer + target + column, tl.load(x_pointer + source + column, mask=beside), mask=beside
        )
