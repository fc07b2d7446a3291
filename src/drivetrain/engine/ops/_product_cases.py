"""Calls of the numerics grids of ``linear``, ``qkv_product``, ``gate_up_product`` and ``grouped_product``."""

from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops.operator import Case

__all__ = ["grouped_product_cases", "joined_cases", "linear_cases"]


def _laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "columns":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "gaps":
        return torch.cat((x, x), dim=-1)[..., : x.shape[-1]]
    return x


_INPUTS: tuple[tuple[str, tuple[int, ...], float, str], ...] = (
    ("odd sizes", (3, 5, 37), 1.0, "rows"),
    ("one row", (1, 40), 1.0, "rows"),
    ("one feature", (9, 1), 1.0, "rows"),
    ("no rows", (0, 40), 1.0, "rows"),
    ("many rows", (1037, 24), 1.0, "rows"),
    ("columns first in memory", (12, 65), 1.0, "columns"),
    ("gaps between rows", (12, 65), 1.0, "gaps"),
    ("large values", (8, 40), 100.0, "rows"),
    ("small values", (8, 40), 1e-2, "rows"),
)


def _of(
    name: str, shape: tuple[int, ...], scale: float, layout: str, widths: dict[str, int], biases: bool
) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        features = shape[-1]
        tensors = {"x": _laid_out(torch.randn(shape, generator=generator) * scale, layout)}
        for number, (key, width) in enumerate(widths.items()):
            # Of different sizes: one read in the place of another shows.
            drawn = torch.randn(width, features, generator=generator) * (1.0 + number) / features**0.5
            tensors[key] = _laid_out(drawn, layout)
        if biases:
            tensors["bias"] = torch.randn(next(iter(widths.values())), generator=generator) * scale
        return {key: one.to(dtype).requires_grad_() for key, one in tensors.items()}

    return Case(name, make)


def linear_cases() -> list[Case]:
    """Of ``linear``: a weight with fewer rows than columns, and one with more."""
    return [
        *(_of(*one, {"weight": 7}, biases=False) for one in _INPUTS),
        _of("more outputs than inputs", (6, 5), 1.0, "rows", {"weight": 40}, biases=False),
        _of("one output", (6, 5), 1.0, "rows", {"weight": 1}, biases=False),
        _of("bias", (2, 6, 33), 1.0, "rows", {"weight": 20}, biases=True),
        _of("a vector", (33,), 1.0, "rows", {"weight": 20}, biases=False),
    ]


def joined_cases(widths: dict[str, int]) -> list[Case]:
    """Of one product for several weights.

    Args:
        widths: outputs of each weight by its name.
    """
    return [_of(*one, widths, biases=False) for one in _INPUTS]


_GROUPS: tuple[tuple[str, list[int], int, int, int, str], ...] = (
    ("odd numbers of rows", [3, 7, 1, 5], 0, 16, 24, "rows"),
    ("empty experts", [0, 4, 0, 0, 9, 0], 0, 16, 24, "rows"),
    ("all experts empty", [0, 0, 0], 0, 16, 24, "rows"),
    ("rows past the last expert", [3, 7, 1, 5], 6, 16, 24, "rows"),
    ("nothing but rows past the last expert", [0, 0, 0], 6, 16, 24, "rows"),
    ("one expert", [11], 0, 16, 24, "rows"),
    ("one expert, rows past it", [11], 5, 16, 24, "rows"),
    ("many experts", [number % 3 for number in range(64)], 2, 8, 8, "rows"),
    ("columns first in memory", [3, 7, 1, 5], 2, 16, 24, "columns"),
    ("gaps between rows", [3, 7, 1, 5], 2, 16, 24, "gaps"),
    ("sizes that are not aligned", [3, 0, 5], 2, 13, 7, "rows"),
)


def grouped_product_cases() -> list[Case]:
    """Of ``grouped_product``; in "columns first in memory" and "gaps between rows" it is x alone that is so."""

    def case(name: str, counts: list[int], past: int, features: int, outputs: int, layout: str) -> Case:
        def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
            rows = sum(counts) + past
            x = _laid_out(torch.randn(rows, features, generator=generator), layout)
            weight = torch.randn(len(counts), features, outputs, generator=generator) / features**0.5
            return {
                "x": x.to(dtype).requires_grad_(),
                "weight": weight.to(dtype).requires_grad_(),
                "ends": torch.tensor(counts).cumsum(0).to(torch.int32),
            }

        return Case(name, make)

    return [case(*one) for one in _GROUPS]
