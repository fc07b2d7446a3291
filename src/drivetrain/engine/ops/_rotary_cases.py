"""Calls of the numerics grid of ``rotary``."""

from typing import Any

import torch

from drivetrain.engine.ops.operator import Case

__all__ = ["rotary_cases"]


def _case(
    name: str,
    shape: tuple[int, ...],
    rotary_size: int,
    style: str,
    *,
    wide_angles: bool = False,
    gaps: bool = False,
    scale: float = 1.0,
) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        tokens = shape[:-2]
        angles = torch.rand((*tokens, rotary_size // 2), generator=generator) * 20 - 10
        angle_dtype = torch.promote_types(dtype, torch.float32) if wide_angles else dtype
        x = (torch.randn(shape, generator=generator) * scale).to(dtype)
        if gaps:
            # Queries inside a packed product: the row of a token is longer than its heads.
            packed = torch.zeros((*tokens, 3 * shape[-2], shape[-1]), dtype=dtype)
            packed[..., : shape[-2], :] = x
            x = packed[..., : shape[-2], :]
        return {
            "x": x.requires_grad_(),
            "cosine": angles.cos().to(angle_dtype),
            "sine": angles.sin().to(angle_dtype),
            "style": style,
        }

    return Case(name, make)


def rotary_cases() -> list[Case]:
    """Both styles; all, some and an odd power of features; layouts and sizes."""
    made = []
    for style in ("half", "interleaved"):
        made += [
            _case(f"{style}, all features", (7, 3, 32), 32, style),
            _case(f"{style}, 6 of 16 features", (5, 2, 16), 6, style),
            _case(f"{style}, 80 of 96 features", (3, 2, 96), 80, style),
            _case(f"{style}, 96 of 128 features", (3, 1, 128), 96, style),
            _case(f"{style}, heads of 192", (3, 1, 192), 192, style),
            _case(f"{style}, angles in fp32", (5, 2, 16), 16, style, wide_angles=True),
        ]
    return [
        *made,
        _case("two leading dimensions", (2, 5, 3, 8), 8, "half"),
        _case("an odd number of features", (4, 2, 7), 6, "half"),
        _case("one token", (1, 3, 16), 16, "half"),
        _case("one pair", (24, 1, 2), 2, "half"),
        _case("no tokens", (0, 2, 8), 8, "half"),
        _case("inside a packed product", (6, 2, 16), 16, "half", gaps=True),
        _case("large values", (6, 2, 16), 16, "half", scale=3e3),
    ]
