"""The Triton rotary embedding as an operator of torch."""

from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops._triton_available import next_power_of_two, triton_refuses
from drivetrain.engine.ops.signature import Signature

__all__ = ["ROTARY_KERNELS", "triton_rotary", "triton_rotary_refuses"]

ROTARY_KERNELS = ("rotary_kernel",)
_TILE = 1024
_MOST_ROWS = 32


def triton_rotary_refuses(signature: Signature) -> str | None:
    """Why the kernel cannot serve a call; None where it can."""
    for name in ("cosine", "sine"):
        angles = signature.argument(name)
        if angles is not None and angles.requires_grad:
            return f"{name} wants a gradient, which the kernel does not compute"
    return triton_refuses(signature)


@torch.library.custom_op("drivetrain::rotary", mutates_args=())
def _turn(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    from drivetrain.engine.ops._triton_rotary import rotary_kernel

    # Heads of a packed product stay where they are; only features must be neighbours.
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, size = x.shape
    half = cosine.shape[-1]
    rest = next_power_of_two(size - 2 * half) if size > 2 * half else 0
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = next_power_of_two(half)
    block_rows = max(1, min(_MOST_ROWS, _TILE // max(block, rest)))
    if x.numel():
        with torch.cuda.device_of(x):
            rotary_kernel[(-(-tokens * heads // block_rows),)](
                x,
                cosine.contiguous(),
                sine.contiguous(),
                out,
                tokens * heads,
                heads,
                size,
                half,
                x.stride(0),
                x.stride(1),
                INTERLEAVED=interleaved,
                INVERSE=inverse,
                ROWS=block_rows,
                HALF=block,
                REST=rest,
            )
    return out


@_turn.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - called by this name
    _x, cosine, sine, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cosine, sine)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    cosine, sine = ctx.saved_tensors
    return _turn(gradient, cosine, sine, ctx.interleaved, not ctx.inverse), None, None, None, None


_turn.register_autograd(_gradients, setup_context=_keep)


def triton_rotary(x: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool) -> Tensor:
    """``rotary`` by our Triton kernel; shapes as of the reference, which checked them."""
    half = cosine.shape[-1]
    out: Tensor = _turn(
        x.reshape(-1, *x.shape[-2:]), cosine.reshape(-1, half), sine.reshape(-1, half), interleaved, False
    )
    return out.view(x.shape)
