"""The Triton kernels of ``glu``. Import this module in functions alone: Triton is optional."""

import triton
import triton.language as tl

__all__ = ["glu_backward", "glu_forward"]


@triton.jit
def glu_forward(
    gate_pointer,
    up_pointer,
    out_pointer,
    size,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK features of one row; out is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_pointer + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_pointer + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        activated = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu_tanh":
        # gelu(x) = x sigmoid(2 u), with tanh(u) = 2 sigmoid(2 u) - 1 and u = sqrt(2 / pi) (x + 0.044715 x^3).
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(
        out_pointer + row * size + column, (activated * up).to(out_pointer.dtype.element_ty), mask=inside
    )


@triton.jit
def glu_backward(
    gradient_pointer,
    gate_pointer,
    up_pointer,
    of_gate_pointer,
    of_up_pointer,
    size,
    gate_stride,
    up_stride,
    gradient_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of BLOCK features of one row; both have rows of ``gradient_stride`` elements."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_pointer + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_pointer + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_pointer + row * size + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        share = tl.sigmoid(gate)
        activated = gate * share
        slope = share + activated * (1.0 - share)
    elif ACTIVATION == "gelu_tanh":
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        activated = gate * share
        slope = share + activated * (1.0 - share) * (1.5957691216057308 * (1.0 + 0.134145 * gate * gate))
    else:
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        activated = gate * share
        slope = share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    kind = of_gate_pointer.dtype.element_ty
    target = row * gradient_stride + column
    tl.store(of_gate_pointer + target, (gradient * up * slope).to(kind), mask=inside)
    tl.store(of_up_pointer + target, (gradient * activated).to(kind), mask=inside)
