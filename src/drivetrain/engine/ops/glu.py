"""Gated linear units: ``y = activation(gate) * up``. SwiGLU with ``silu``, GeGLU with ``gelu_tanh`` or ``gelu_erf``.

Shazeer, arXiv:2002.05202. Gate and up come as two tensors, or as one that packs ``[gate, up]`` along the features, gate
first, as one matrix product for both leaves it. Some checkpoints have the halves in the other order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.engine.ops._compiled import compiled, inductor_refuses
from drivetrain.engine.ops._glu_cases import glu_cases
from drivetrain.engine.ops._triton_available import triton_refuses
from drivetrain.engine.ops._triton_glu_calls import GLU_KERNELS, triton_glu
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


_compiled_glu = compiled(_formula)


def _inductor(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    check_glu(gate, up, activation)
    return _compiled_glu(gate, up, activation)


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
        Backend("inductor", _inductor, inductor_refuses, ran_on=("cpu",), kernels=("_formula",)),
        Backend("triton", _triton, triton_refuses, kernels=GLU_KERNELS),
    ),
)
