"""Calls of the numerics grid of ``adamw``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops.operator import Case

__all__ = ["adamw_cases"]

_Shapes = tuple[tuple[int, ...], ...]
_ODD: _Shapes = ((3, 5, 37), (41,), (2, 1, 7))
_WIDE = (torch.float32, torch.bfloat16)


def _as_drawn(x: Tensor) -> Tensor:
    return x


def _columns_first(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


def _of_sum(x: Tensor) -> Tensor:
    """One number for all elements with strides of 0, as the gradient of a plain sum is."""
    return x.reshape(-1)[0].expand(x.shape)


def _first_row_zero(x: Tensor) -> Tensor:
    x = x.clone()
    x[:1] = 0
    return x


def _case(
    name: str,
    shapes: _Shapes = _ODD,
    *,
    step: int = 7,
    rate: float = 0.3,
    parameter_scale: float = 1.0,
    gradient_scale: float = 1.0,
    moment_scale: float = 0.5,
    gradient: Callable[[Tensor], Tensor] = _as_drawn,
    moments: Callable[[Tensor], Tensor] = _as_drawn,
    of_parameters: torch.dtype | None = None,
    of_moments: torch.dtype | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16),
    **options: float,
) -> Case:
    """``gradient_scale`` is that of the moments too. The rate is large: no update is to be lost in its parameter."""

    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        def drawn(scale: float) -> list[Tensor]:
            return [torch.randn(shape, generator=generator) * scale for shape in shapes]

        parameters = [one.to(of_parameters or dtype) for one in drawn(parameter_scale)]
        gradients = [gradient(one.to(dtype)) for one in drawn(gradient_scale)]
        first = [moments(one.to(of_moments or dtype)) for one in drawn(gradient_scale * moment_scale)]
        # Not below the square of the first moment by much, as in training: an update is then of about the rate.
        second = [
            moments(
                (one.float().square() * (0.5 + torch.rand(one.shape, generator=generator))).to(
                    of_moments or dtype
                )
            )
            for one in first
        ]
        return {
            "parameters": tuple(parameters),
            "gradients": tuple(gradients),
            "first_moments": tuple(first),
            "second_moments": tuple(second),
            "step": torch.tensor(step),
            "learning_rate": torch.tensor(rate),
            **{"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, **options},
        }

    return Case(name, make, dtypes)


def adamw_cases() -> list[Case]:
    """Shapes, layouts, dtypes beside each other, numbers of the update, and values."""
    return [
        _case("odd sizes"),
        _case("one element", ((1,), ())),
        _case("an empty tensor among others", ((0, 8), (5,), (3, 0))),
        _case("many elements", ((70_003,),)),
        _case("many tensors", tuple((1 + number % 5, 3) for number in range(60))),
        _case("the first update", step=1, moment_scale=0.0),
        _case("the first update of a long memory", step=1, moment_scale=0.0, beta2=0.999),
        _case("the second update", step=2),
        _case("the millionth update", step=1_000_000, beta2=0.999),
        _case("parameters of zero", parameter_scale=0.0),
        _case("rows of zeros", gradient=_first_row_zero, moments=_first_row_zero),
        _case("no decay", weight_decay=0.0),
        _case("strong decay", weight_decay=2.5),
        _case("no memory", beta1=0.0, beta2=0.0),
        _case("large epsilon", epsilon=0.1),
        _case("a rate of zero", rate=0.0),
        _case("small rate", rate=1e-3, parameter_scale=0.02),
        _case("gradients below epsilon", gradient_scale=1e-11, parameter_scale=0.0, dtypes=_WIDE),
        _case("large gradients", gradient_scale=1e14, parameter_scale=0.0, dtypes=_WIDE),
        # Squares leave fp32 unless they are multiplied by their share first, and their quotient does at once.
        _case("gradients of 1e19", step=1, gradient_scale=1e19, moment_scale=0.1, dtypes=_WIDE),
        _case("gradients with columns first in memory", gradient=_columns_first),
        _case("moments with columns first in memory", moments=_columns_first),
        _case("gradients of a sum", gradient=_of_sum),
        _case("parameters in fp32", of_parameters=torch.float32),
        _case("all but the gradients in fp32", of_parameters=torch.float32, of_moments=torch.float32),
        _case("moments in bf16", of_moments=torch.bfloat16),
    ]
