"""The Triton sums of squares of a gradient as an operator of torch."""

import torch
from torch import Tensor

__all__ = ["SQUARES_KERNELS", "triton_sums_of_squares"]

SQUARES_KERNELS = ("sums_of_squares",)
_BLOCK = 4096


def _sums(gradient: Tensor) -> Tensor:
    return gradient.new_empty(-(-gradient.numel() // _BLOCK), dtype=torch.float32)


@torch.library.custom_op("drivetrain::sums_of_squares", mutates_args=())
def triton_sums_of_squares(gradient: Tensor) -> Tensor:
    """The squares of a gradient's elements, added up for each block of them: fp32 (blocks), none for no elements."""
    from drivetrain.engine.ops._triton_norm_of_list import sums_of_squares

    sums = _sums(gradient)
    if sums.numel():
        with torch.cuda.device_of(gradient):
            sums_of_squares[(sums.numel(),)](gradient.contiguous(), sums, gradient.numel(), BLOCK=_BLOCK)
    return sums


@triton_sums_of_squares.register_fake
def _(gradient: Tensor) -> Tensor:
    return _sums(gradient)
