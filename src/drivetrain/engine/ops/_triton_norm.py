"""Triton kernels of all norms. Import this module in functions alone: Triton is optional.

Written so that Triton's interpreter runs them on a CPU: values are fp32 from the load to the store, no libdevice, sums
over programs are left to the caller. Each program holds ROWS whole rows of up to BLOCK features. Offsets are int64.
"""

import triton
import triton.language as tl

__all__ = ["norm_backward", "norm_forward"]


@triton.jit
def norm_forward(
    x_pointer,
    residual_pointer,
    weight_pointer,
    bias_pointer,
    out_pointer,
    total_pointer,
    mean_pointer,
    scale_pointer,
    rows,
    size,
    EPSILON: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise ROWS rows; all tensors are contiguous, mean and scale have one fp32 number for each row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    at = row[:, None] * size + column[None, :]
    x = tl.load(x_pointer + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x = x + tl.load(residual_pointer + at, mask=inside, other=0.0).to(tl.float32)
        # What is normalised is what is stored: backward reads the rounded sum.
        total = x.to(total_pointer.dtype.element_ty)
        tl.store(total_pointer + at, total, mask=inside)
        x = total.to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 1) / size
        tl.store(mean_pointer + row, mean, mask=row < rows)
        x = tl.where(inside, x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / size + EPSILON)
    tl.store(scale_pointer + row, scale, mask=row < rows)
    normed = x * scale[:, None]
    if ROUNDS_FIRST:
        normed = normed.to(out_pointer.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_pointer + column, mask=column < size, other=0.0).to(tl.float32) + OFFSET
    out = normed * weight[None, :]
    if HAS_BIAS:
        out = out + tl.load(bias_pointer + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    tl.store(out_pointer + at, out.to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    gradient_pointer,
    gradient_of_total_pointer,
    total_pointer,
    weight_pointer,
    mean_pointer,
    scale_pointer,
    of_total_pointer,
    of_weight_pointer,
    of_bias_pointer,
    rows,
    size,
    blocks_per_program,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_GRADIENT_OF_TOTAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of some blocks of ROWS rows; those of weight and bias, fp32, are the sums of this program's rows."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_pointer + column, mask=column < size, other=0.0).to(tl.float32) + OFFSET
    of_weight = tl.zeros([BLOCK], dtype=tl.float32)
    of_bias = tl.zeros([BLOCK], dtype=tl.float32)
    for block in range(0, blocks_per_program):
        row = (program * blocks_per_program + block) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < size)[None, :]
        at = row[:, None] * size + column[None, :]
        x = tl.load(total_pointer + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_pointer + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_pointer + row, mask=row < rows, other=0.0)
        if CENTRED:
            mean = tl.load(mean_pointer + row, mask=row < rows, other=0.0)
            x = tl.where(inside, x - mean[:, None], 0.0)
        normed = x * scale[:, None]
        of_weight += tl.sum(gradient * normed, 0)
        of_normed = gradient * weight[None, :]
        of_total = of_normed - normed * (tl.sum(of_normed * normed, 1) / size)[:, None]
        if CENTRED:
            of_total = of_total - (tl.sum(of_normed, 1) / size)[:, None]
        of_total = of_total * scale[:, None]
        if HAS_BIAS:
            of_bias += tl.sum(gradient, 0)
        if HAS_GRADIENT_OF_TOTAL:
            of_total = of_total + tl.load(gradient_of_total_pointer + at, mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(of_total_pointer + at, of_total.to(of_total_pointer.dtype.element_ty), mask=inside)
    tl.store(of_weight_pointer + program * size + column, of_weight, mask=column < size)
    if HAS_BIAS:
        tl.store(of_bias_pointer + program * size + column, of_bias, mask=column < size)
