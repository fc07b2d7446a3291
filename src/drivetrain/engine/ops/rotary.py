"""Rotary position embedding: each pair ``(a, b)`` of features becomes ``(a cos - b sin, b cos + a sin)``.

Su et al., RoFormer, arXiv:2104.09864. Pairs are ``(i, i + R/2)`` in the style ``half`` (GPT-NeoX, Llama), ``(2i, 2i
+ 1)`` in the style ``interleaved`` (GPT-J), of the first R features, the rotary ones; the others go through. Scaled
forms, such as that of Llama 3, change the angles and not this operator: see ``RotaryEmbedding``. Always out of place.
"""

import torch
from torch import Tensor

from drivetrain.engine.ops._compiled import compiled, inductor_refuses
from drivetrain.engine.ops._rotary_cases import rotary_cases
from drivetrain.engine.ops._triton_rotary_calls import ROTARY_KERNELS, triton_rotary, triton_rotary_refuses
from drivetrain.engine.ops.adapters import adapters_of
from drivetrain.engine.ops.operator import Backend, Operator, serves_all
from drivetrain.errors import DrivetrainError

__all__ = ["HALF", "INTERLEAVED", "OPERATOR", "rotary"]

HALF = "half"
INTERLEAVED = "interleaved"


def rotary(x: Tensor, cosine: Tensor, sine: Tensor, style: str = HALF) -> Tensor:
    """The reference.

    Args:
        x: (..., H, K) for H heads, floating point.
        cosine, sine: (..., R/2), R not above K, of the angles of each token, for all its heads alike. In fp32 the
        result
            is rounded once.
        style: ``half`` or ``interleaved``.

    Returns:
        (..., H, K) in the dtype of x; a new tensor.

    Raises:
        DrivetrainError: the angles do not fit, or there is no such style.
    """
    check_rotary(x, cosine, sine, style)
    wide = torch.promote_types(x.dtype, torch.float32)
    return _rotate(x.to(wide), cosine.to(wide), sine.to(wide), style).to(x.dtype)


def check_rotary(x: Tensor, cosine: Tensor, sine: Tensor, style: str) -> None:
    """Refuse angles that do not belong to x.

    Raises:
        DrivetrainError: shapes do not fit, or there is no such style.
    """
    if style not in (HALF, INTERLEAVED):
        raise DrivetrainError(f"style is {style!r}; there are {HALF} and {INTERLEAVED}")
    if x.dim() < 2 or cosine.shape != sine.shape or cosine.shape[:-1] != x.shape[:-2]:
        raise DrivetrainError(
            f"cosine and sine have the shapes {tuple(cosine.shape)} and {tuple(sine.shape)}; x of {tuple(x.shape)} "
            f"(tokens, heads, features) needs {(*x.shape[:-2], x.shape[-1] // 2)} or narrower rows"
        )
    if 2 * cosine.shape[-1] > x.shape[-1]:
        raise DrivetrainError(
            f"{cosine.shape[-1]} angles turn {2 * cosine.shape[-1]} features; x has heads of {x.shape[-1]}"
        )


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, style: str) -> Tensor:
    """The equation in the dtype of x."""
    half = cosine.shape[-1]
    cosine, sine = cosine.to(x.dtype).unsqueeze(-2), sine.to(x.dtype).unsqueeze(-2)
    # split, not slices: its backward is one concatenation.
    turned, rest = x.split((2 * half, x.shape[-1] - 2 * half), dim=-1)
    if style == HALF:
        first, second = turned.split((half, half), dim=-1)
    else:
        first, second = turned.unflatten(-1, (half, 2)).unbind(-1)
    pair = (first * cosine - second * sine, second * cosine + first * sine)
    out = torch.cat(pair, dim=-1) if style == HALF else torch.stack(pair, dim=-1).flatten(-2)
    return out if rest.shape[-1] == 0 else torch.cat((out, rest), dim=-1)


def _eager(x: Tensor, cosine: Tensor, sine: Tensor, style: str = HALF) -> Tensor:
    check_rotary(x, cosine, sine, style)
    return _rotate(x, cosine, sine, style)


def _formula(x: Tensor, cosine: Tensor, sine: Tensor, style: str) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return _rotate(x.to(wide), cosine.to(wide), sine.to(wide), style).to(x.dtype)


_compiled_rotary = compiled(_formula)


def _inductor(x: Tensor, cosine: Tensor, sine: Tensor, style: str = HALF) -> Tensor:
    check_rotary(x, cosine, sine, style)
    return _compiled_rotary(x, cosine, sine, style)


def _triton(x: Tensor, cosine: Tensor, sine: Tensor, style: str = HALF) -> Tensor:
    check_rotary(x, cosine, sine, style)
    return triton_rotary(x, cosine, sine, interleaved=style == INTERLEAVED)


OPERATOR = Operator(
    name="rotary",
    equation="(a, b) -> (a cos - b sin, b cos + a sin) for each pair of features of a head",
    source="Su et al., arXiv:2104.09864",
    reference=rotary,
    cases=rotary_cases,
    backends=(
        Backend("eager", _eager, serves_all, ran_on=("cpu",), kernels=("aten::mul", "aten::cat")),
        Backend("inductor", _inductor, inductor_refuses, ran_on=("cpu",), kernels=("_formula",)),
        Backend("triton", _triton, triton_rotary_refuses, kernels=ROTARY_KERNELS),
        *adapters_of("rotary"),
    ),
    # benchmarks/operators.py on a CPU; on CUDA nothing was measured by us.
    untuned={"cpu": ("inductor",), "cuda": ("inductor",)},
)
