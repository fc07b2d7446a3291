"""The Triton update of AdamW as an operator of torch: one launch for each tensor, nothing read on the host."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["ADAMW_KERNELS", "triton_adamw"]

ADAMW_KERNELS = ("adamw_update",)
_BLOCK = 1024


@torch.library.custom_op("drivetrain::adamw_update", mutates_args=())
def _update(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    common: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from drivetrain.engine.ops._triton_adamw import adamw_update

    new = _empty(parameter, first, second)
    size = parameter.numel()
    if size:
        with torch.cuda.device_of(parameter):
            adamw_update[(-(-size // _BLOCK),)](
                parameter.contiguous(),
                gradient.contiguous(),
                first.contiguous(),
                second.contiguous(),
                *new,
                common,
                size,
                BETA1=beta1,
                GRADIENT_SHARE=1 - beta1,
                BETA2=beta2,
                SQUARE_SHARE=1 - beta2,
                EPSILON=epsilon,
                BLOCK=_BLOCK,
            )
    return new


@_update.register_fake
def _(
    parameter: Tensor, _gradient: Tensor, first: Tensor, second: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(parameter, first, second)


def _empty(parameter: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        parameter.new_empty(parameter.shape),
        first.new_empty(first.shape),
        second.new_empty(second.shape),
    )


def triton_adamw(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    common: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One tensor of ``adamw`` by our kernel.

    Args:
        common: (3,) fp32: what is kept of the parameter, the rate over the first moment's bias correction, one over the
            root of the second's.
    """
    with torch.no_grad():
        new: tuple[Tensor, Tensor, Tensor] = _update(
            parameter, gradient, first, second, common, beta1, beta2, epsilon
        )
    return new
