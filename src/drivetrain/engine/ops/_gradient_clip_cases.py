"""Calls of the numerics grid of ``gradient_clip``."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops.operator import Case

__all__ = ["gradient_clip_cases"]

_ODD: tuple[tuple[int, ...], ...] = ((3, 5, 37), (41,), (2, 1, 7))
_WIDE = (torch.float32, torch.bfloat16)


def _as_drawn(x: Tensor) -> Tensor:
    return x


def _columns_first(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


def _of_sum(x: Tensor) -> Tensor:
    """One number for all elements with strides of 0, as the gradient of a plain sum is."""
    return x.reshape(-1)[0].expand(x.shape)


def _equal(x: Tensor) -> Tensor:
    """A third everywhere: whatever is rounded in a sum of its squares goes the same way each time."""
    return torch.full_like(x, 1 / 3)


def _with(value: float) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[0] = value
        return x

    return call


def _case(
    name: str,
    shapes: tuple[tuple[int, ...], ...] = _ODD,
    *,
    max_norm: float = 1.0,
    scale: float = 1.0,
    layout: Callable[[Tensor], Tensor] = _as_drawn,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16),
) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        drawn = [layout((torch.randn(shape, generator=generator) * scale).to(dtype)) for shape in shapes]
        return {"gradients": tuple(drawn), "max_norm": max_norm}

    return Case(name, make, dtypes)


def gradient_clip_cases() -> list[Case]:
    """Shapes, layouts, norms around the bound, and values that are not finite."""
    return [
        _case("above the bound"),
        _case("below the bound", scale=1e-3),
        _case("only measured", max_norm=0.0),
        _case("a bound of infinity", max_norm=math.inf),
        _case("one element", ((1,),), scale=5.0),
        _case("elements without a dimension", ((), (), ()), scale=5.0),
        _case("an empty tensor among others", ((0, 8), (5,), (3, 0))),
        _case("nothing but empty tensors", ((0,), (4, 0))),
        _case("whole rows", ((4, 2048), (2048,))),
        _case("many tensors", tuple((1 + number % 5, 3) for number in range(60))),
        # In fp32 the sums that torch takes by itself on a CPU are off by 1e-5 here.
        _case("many elements", ((1_048_579,),)),
        _case("many equal elements", ((50_000,), (2048,)), layout=_equal),
        _case("gradients of zero", scale=0.0),
        _case("small gradients", scale=1e-9, max_norm=1e-8, dtypes=_WIDE),
        _case("large gradients", scale=1e14, dtypes=_WIDE),
        _case("columns first in memory", layout=_columns_first),
        _case("gradients of a sum", layout=_of_sum),
        _case("infinity", layout=_with(math.inf)),
        _case("negative infinity", layout=_with(-math.inf)),
        _case("not-a-number", layout=_with(math.nan)),
    ]
