"""Gated linear units: ``y = activation(gate) * up``. SwiGLU with ``silu``, GeGLU with ``gelu_tanh`` or ``gelu_erf``.

Shazeer, arXiv:2002.05202. Gate and up come as two tensors, or as one that packs ``[gate, up]`` along the features, gate
first, as one matrix product for both leaves it. Some checkpoints have the halves in the other order.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.engine.ops._compiled import compiled, inductor_refuses
from drivetrain.engine.ops._glu_cases import glu_cases
from drivetrain.engine.ops._triton_available import triton_refuses
from drivetrain.engine.ops._triton_glu_calls import GLU_KERNELS, triton_glu
from drivetrain.engine.ops.adapters import adapters_of
from drivetrain.engine.ops.operator import Backend, Operator, serves_all
from drivetrain.errors import DrivetrainError

__all__ = ["ACTIVATIONS", "OPERATOR", "check_activation", "glu"]

ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf")


def glu(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    """The reference.

    Args:
        gate: (..., F) floating point; without ``up``, both packed as (..., 2F), gate first.
        up: (..., F) in the dtype of gate.
        activation: ``silu``, ``gelu_tanh`` or ``gelu_erf``.

    Returns:
        (..., F) in the dtype of gate, rounded once.

    Raises:
        DrivetrainError: shapes do not fit, or there is no such activation.
    """
    check_glu(gate, up, activation)
    return _formula(gate, up, activation)


def check_activation(activation: str) -> None:
    """Refuse an activation that is not there.

    Raises:
        DrivetrainError: it is not.
    """
    if activation not in ACTIVATIONS:
        raise DrivetrainError(f"activation is {activation!r}; there are {', '.join(ACTIVATIONS)}")


def check_glu(gate: Tensor, up: Tensor | None, activation: str) -> None:
    """Refuse what does not belong together.

    Raises:
        DrivetrainError: shapes or dtypes do not fit, or there is no such activation.
    """
    check_activation(activation)
    if up is None and gate.shape[-1] % 2:
        raise DrivetrainError(f"gate and up packed in {gate.shape[-1]} features; their number is to be even")
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype):
        raise DrivetrainError(
            f"gate is {gate.dtype} {tuple(gate.shape)} and up {up.dtype} {tuple(up.shape)}; they are to be alike"
        )


def _activate(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    # chunk, not slices: its backward is one concatenation.
    first, second = gate.chunk(2, dim=-1)
    return first, second


def _formula(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    first, second = _halves(gate, up)
    return (_activate(first.to(wide), activation) * second.to(wide)).to(gate.dtype)


def _eager(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    check_glu(gate, up, activation)
    first, second = _halves(gate, up)
    return _activate(first, activation) * second


def _backward_formula(
    gradient: Tensor, gate: Tensor, up: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None]:
    """One exponential for an element, where torch's formulas for silu and its gradient take one each."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    first, second = (one.to(wide) for one in _halves(gate, up))
    gradient = gradient.to(wide)
    if activation == "gelu_erf":
        share = 0.5 * (1.0 + torch.erf(first * math.sqrt(0.5)))
        slope = share + first * torch.exp(-0.5 * first * first) / math.sqrt(2.0 * math.pi)
    elif activation == "gelu_tanh":
        # gelu(x) = x sigmoid(2 u), with tanh(u) = 2 sigmoid(2 u) - 1 and u = sqrt(2 / pi) (x + 0.044715 x^3).
        double = math.sqrt(8.0 / math.pi)
        share = torch.sigmoid(double * (first + 0.044715 * first * first * first))
        slope = share + first * share * (1.0 - share) * (double * (1.0 + 0.134145 * first * first))
    else:
        share = torch.sigmoid(first)
        slope = share + first * share * (1.0 - share)
    of_gate, of_up = (gradient * second * slope).to(gate.dtype), (gradient * first * share).to(gate.dtype)
    return (of_gate, of_up) if up is not None else (torch.cat((of_gate, of_up), dim=-1), None)


_compiled_forward = compiled(_formula)
_compiled_backward = compiled(_backward_formula)


class _CompiledGLU(torch.autograd.Function):
    """Keeps its inputs alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _compiled_forward(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return *_compiled_backward(gradient, gate, up, ctx.activation), None


def _inductor(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    check_glu(gate, up, activation)
    out: Tensor = _CompiledGLU.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return out


def _triton(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    check_glu(gate, up, activation)
    return triton_glu(gate, up, activation)


OPERATOR = Operator(
    name="glu",
    equation="y = activation(gate) * up",
    source="Shazeer, arXiv:2002.05202",
    reference=glu,
    cases=glu_cases,
    backends=(
        Backend(
            "eager", _eager, serves_all, ran_on=("cpu",), kernels=("aten::silu", "aten::gelu", "aten::mul")
        ),
        Backend(
            "inductor",
            _inductor,
            inductor_refuses,
            ran_on=("cpu",),
            kernels=("_formula", "_backward_formula"),
        ),
        Backend("triton", _triton, triton_refuses, kernels=GLU_KERNELS),
        *adapters_of("glu"),
    ),
    # benchmarks/operators.py on a CPU; on CUDA nothing was measured by us.
    untuned={"cpu": ("inductor",), "cuda": ("inductor",)},
)
