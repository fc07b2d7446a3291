"""Calls of the numerics grid of the four norms."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops._norm_formulas import BEFORE_WEIGHT
from drivetrain.engine.ops.operator import Case

__all__ = ["add_layer_norm_cases", "add_rms_norm_cases", "layer_norm_cases", "rms_norm_cases"]

_Shape = Callable[[Tensor], Tensor]


def _drawn(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    scale: float = 1.0,
    middle: float = 0.0,
) -> Tensor:
    return (torch.randn(shape, generator=generator) * scale + middle).to(dtype)


def _transposed(x: Tensor) -> Tensor:
    """The same values with columns in the order of memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _with_gaps(x: Tensor) -> Tensor:
    """The same values as every second row of a wider tensor."""
    wider = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
    wider[..., : x.shape[-1]] = x
    return wider[..., : x.shape[-1]]


def _half_zero(x: Tensor) -> Tensor:
    """Every second row all zeros."""
    x = x.clone()
    x[::2] = 0
    return x


def _as_drawn(x: Tensor) -> Tensor:
    return x


_INPUTS: tuple[tuple[str, tuple[int, ...], float, _Shape], ...] = (
    ("odd sizes", (3, 5, 37), 1.0, _as_drawn),
    ("one row", (1, 64), 1.0, _as_drawn),
    ("one feature", (9, 1), 1.0, _as_drawn),
    ("seven features", (9, 7), 1.0, _as_drawn),
    ("one dimension", (48,), 1.0, _as_drawn),
    ("no rows", (0, 64), 1.0, _as_drawn),
    ("many rows", (1037, 96), 1.0, _as_drawn),
    ("long rows", (3, 5003), 1.0, _as_drawn),
    ("columns first in memory", (12, 65), 1.0, _transposed),
    ("gaps between rows", (12, 65), 1.0, _with_gaps),
    ("rows of zeros", (8, 40), 1.0, _half_zero),
    ("large values", (8, 40), 3e3, _as_drawn),
    ("small values", (8, 40), 1e-3, _as_drawn),
)


def _cases(*, adds: bool, has_bias: bool, options: dict[str, dict[str, Any]]) -> list[Case]:
    """Every input with default options, and every option with one input."""

    def case(
        name: str,
        shape: tuple[int, ...],
        scale: float,
        layout: _Shape,
        given: dict[str, Any],
        wide: tuple[str, ...] = (),
        without: tuple[str, ...] = (),
    ) -> Case:
        def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
            def of(name: str) -> torch.dtype:
                return torch.promote_types(dtype, torch.float32) if name in wide else dtype

            tensors = {"x": layout(_drawn(shape, of("x"), generator, scale))}
            if adds:
                # Of another size than x: one read in the place of the other shows.
                tensors["residual"] = layout(_drawn(shape, of("residual"), generator, 2 * scale))
            tensors["weight"] = _drawn(shape[-1:], of("weight"), generator, 0.5, 1.0)
            if has_bias and "bias" not in without:
                tensors["bias"] = _drawn(shape[-1:], of("bias"), generator, 0.5)
            return {**{name: one.requires_grad_() for name, one in tensors.items()}, **given}

        return Case(name, make)

    made = [
        case(name, shape, scale, layout, {})
        for name, shape, scale, layout in _INPUTS
        # Less its mean, one feature is nothing: what LayerNorm makes of it is all rounding.
        if not (has_bias and shape[-1] == 1)
    ]
    made.append(case("weight in fp32", (6, 33), 1.0, _as_drawn, {}, ("weight", "bias")))
    if adds:
        made.append(case("residual in fp32", (6, 33), 1.0, _as_drawn, {}, ("residual",)))
    if has_bias:
        made.append(case("no bias", (6, 33), 1.0, _as_drawn, {}, without=("bias",)))
    made += [case(name, (6, 33), 1.0, _as_drawn, given) for name, given in options.items()]
    return made


_RMS_OPTIONS: dict[str, dict[str, Any]] = {
    "large epsilon": {"epsilon": 0.5},
    "Gemma's offset": {"offset": 1.0},
    "rounded before the weight": {"casting": BEFORE_WEIGHT},
    "offset, rounded before the weight": {"offset": 1.0, "casting": BEFORE_WEIGHT},
}
_LAYER_OPTIONS: dict[str, dict[str, Any]] = {"large epsilon": {"epsilon": 0.5}}


def rms_norm_cases() -> list[Case]:
    """Of ``rms_norm``."""
    return _cases(adds=False, has_bias=False, options=_RMS_OPTIONS)


def add_rms_norm_cases() -> list[Case]:
    """Of ``add_rms_norm``."""
    return _cases(adds=True, has_bias=False, options=_RMS_OPTIONS)


def layer_norm_cases() -> list[Case]:
    """Of ``layer_norm``."""
    return _cases(adds=False, has_bias=True, options=_LAYER_OPTIONS)


def add_layer_norm_cases() -> list[Case]:
    """Of ``add_layer_norm``."""
    return _cases(adds=True, has_bias=True, options=_LAYER_OPTIONS)
