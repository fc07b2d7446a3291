"""Calls of the numerics grid of ``glu``."""

from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops.operator import Case

__all__ = ["glu_cases"]


def _columns_first(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _case(
    name: str,
    shape: tuple[int, ...],
    activation: str = "silu",
    *,
    packed: bool = True,
    scale: float = 1.0,
    transposed: bool = False,
) -> Case:
    """``shape`` is that of the result."""

    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        gate = (torch.randn(shape, generator=generator) * scale).to(dtype)
        # Of another size: halves that are swapped show.
        up = (torch.randn(shape, generator=generator) * 3 * scale).to(dtype)
        parts = {"gate": torch.cat((gate, up), dim=-1)} if packed else {"gate": gate, "up": up}
        if transposed:
            parts = {name: _columns_first(part) for name, part in parts.items()}
        return {**{name: part.requires_grad_() for name, part in parts.items()}, "activation": activation}

    return Case(name, make)


def glu_cases() -> list[Case]:
    """Each activation, packed and in two tensors; sizes, layouts and values."""
    made = [
        _case(f"{activation}, {'packed' if packed else 'two tensors'}", (3, 5, 37), activation, packed=packed)
        for activation in ("silu", "gelu_tanh", "gelu_erf")
        for packed in (True, False)
    ]
    return [
        *made,
        _case("one row", (1, 64)),
        _case("one feature", (7, 1)),
        _case("one dimension", (40,)),
        _case("no rows", (0, 8)),
        _case("long rows", (3, 2500)),
        _case("columns first in memory, packed", (6, 20), transposed=True),
        _case("columns first in memory, two tensors", (6, 20), packed=False, transposed=True),
        *(
            _case(f"large values, {one}", (6, 20), one, scale=60.0)
            for one in ("silu", "gelu_tanh", "gelu_erf")
        ),
        _case("small values", (6, 20), scale=1e-2),
    ]
