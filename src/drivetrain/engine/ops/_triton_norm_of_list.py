"""The Triton kernel of ``gradient_clip``. Import this module in functions alone: Triton is optional."""

import triton
import triton.language as tl

__all__ = ["sums_of_squares"]


@triton.jit
def sums_of_squares(gradient_pointer, sums_pointer, size, BLOCK: tl.constexpr):
    """One fp32 sum for BLOCK contiguous elements, added in a tree; what adds them up is left to the caller."""
    program = tl.program_id(0)
    element = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(gradient_pointer + element, mask=element < size, other=0.0).to(tl.float32)
    tl.store(sums_pointer + program, tl.sum(values * values, axis=0))
