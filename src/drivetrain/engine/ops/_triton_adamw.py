"""The Triton kernel of ``adamw``. Import this module in functions alone: Triton is optional."""

import triton
import triton.language as tl

__all__ = ["adamw_update"]


@triton.jit
def adamw_update(
    parameter_pointer,
    gradient_pointer,
    first_pointer,
    second_pointer,
    new_parameter_pointer,
    new_first_pointer,
    new_second_pointer,
    common_pointer,
    size,
    BETA1: tl.constexpr,
    GRADIENT_SHARE: tl.constexpr,
    BETA2: tl.constexpr,
    SQUARE_SHARE: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements; all tensors are contiguous. Offsets are int64: tensors of more than 2^31 elements are updated to
    their end. The shares are one minus the betas, taken in fp64."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    kept = tl.load(common_pointer)
    rate = tl.load(common_pointer + 1)
    correction = tl.load(common_pointer + 2)
    parameter = tl.load(parameter_pointer + element, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_pointer + element, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(first_pointer + element, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(second_pointer + element, mask=inside, other=0.0).to(tl.float32)
    first = BETA1 * first + GRADIENT_SHARE * gradient
    second = BETA2 * second + SQUARE_SHARE * gradient * gradient
    denominator = tl.sqrt_rn(second) * correction + EPSILON
    parameter = kept * parameter - tl.div_rn(rate * first, denominator)
    tl.store(
        new_parameter_pointer + element, parameter.to(new_parameter_pointer.dtype.element_ty), mask=inside
    )
    tl.store(new_first_pointer + element, first.to(new_first_pointer.dtype.element_ty), mask=inside)
    tl.store(new_second_pointer + element, second.to(new_second_pointer.dtype.element_ty), mask=inside)
