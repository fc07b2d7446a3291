"""The Triton gated linear units as operators of torch."""

from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops._triton_available import next_power_of_two

__all__ = ["GLU_KERNELS", "triton_glu"]

GLU_KERNELS = ("glu_forward", "glu_backward")
_LARGEST_BLOCK = 1024


def _rows(x: Tensor) -> Tensor:
    """Rows may lie apart; only features must be neighbours."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _split(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Gate, up, and the features of each."""
    gate = _rows(gate)
    if up is None:
        half = gate.shape[-1] // 2
        return gate[:, :half], gate[:, half:], half
    return gate, _rows(up), gate.shape[-1]


def _grid(rows: int, size: int) -> tuple[tuple[int, int], int]:
    block = min(_LARGEST_BLOCK, next_power_of_two(size))
    return (rows, -(-size // block)), block


@torch.library.custom_op("drivetrain::glu_forward", mutates_args=())
def _forward(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    from drivetrain.engine.ops._triton_glu import glu_forward

    first, second, size = _split(gate, up)
    out = torch.empty((gate.shape[0], size), dtype=gate.dtype, device=gate.device)
    if out.numel():
        grid, block = _grid(gate.shape[0], size)
        with torch.cuda.device_of(gate):
            glu_forward[grid](
                first,
                second,
                out,
                size,
                first.stride(0),
                second.stride(0),
                ACTIVATION=activation,
                BLOCK=block,
            )
    return out


@_forward.register_fake
def _(gate: Tensor, up: Tensor | None, *_: Any) -> Tensor:
    return gate.new_empty((gate.shape[0], gate.shape[1] if up is not None else gate.shape[1] // 2))


def _launch_backward(
    gradient: Tensor, gate: Tensor, up: Tensor | None, activation: str, of_gate: Tensor, of_up: Tensor
) -> None:
    from drivetrain.engine.ops._triton_glu import glu_backward

    if not gradient.numel():
        return
    first, second, size = _split(gate, up)
    grid, block = _grid(gate.shape[0], size)
    with torch.cuda.device_of(gate):
        glu_backward[grid](
            gradient.contiguous(),
            first,
            second,
            of_gate,
            of_up,
            size,
            first.stride(0),
            second.stride(0),
            of_gate.stride(0),
            ACTIVATION=activation,
            BLOCK=block,
        )


@torch.library.custom_op("drivetrain::glu_backward_packed", mutates_args=())
def _backward_packed(gradient: Tensor, gate: Tensor, activation: str) -> Tensor:
    of_both = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    half = gate.shape[-1] // 2
    _launch_backward(gradient, gate, None, activation, of_both[:, :half], of_both[:, half:])
    return of_both


@_backward_packed.register_fake
def _(_gradient: Tensor, gate: Tensor, *_: Any) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("drivetrain::glu_backward", mutates_args=())
def _backward(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    of_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    of_up = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch_backward(gradient, gate, up, activation, of_gate, of_up)
    return of_gate, of_up


@_backward.register_fake
def _(_gradient: Tensor, gate: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - called by this name
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    if up is None:
        return _backward_packed(gradient, gate, ctx.activation), None, None
    of_gate, of_up = _backward(gradient, gate, up, ctx.activation)
    return of_gate, of_up, None


_forward.register_autograd(_gradients, setup_context=_keep)


def triton_glu(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """``glu`` by our Triton kernels; the reference has checked the arguments."""
    flat = gate.reshape(-1, gate.shape[-1])
    out: Tensor = _forward(flat, None if up is None else up.reshape(flat.shape), activation)
    return out.view(*gate.shape[:-1], out.shape[-1])
