"""A call of ``adamw``, and names that its tests share."""

from typing import Any

import torch

__all__ = ["LISTS", "drawn"]

LISTS = ("parameters", "gradients", "first_moments", "second_moments")


def drawn(*shapes: tuple[int, ...], **options: Any) -> dict[str, Any]:
    """Arguments of ``adamw`` in fp32 for parameters of these shapes; ``options`` come in addition, or instead."""
    generator = torch.Generator().manual_seed(4)
    lists = [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(3)]
    return {
        "parameters": lists[0],
        "gradients": lists[1],
        "first_moments": lists[2],
        "second_moments": tuple(one.square() for one in lists[2]),
        "step": torch.tensor(3),
        "learning_rate": torch.tensor(0.1, dtype=torch.float64),
        **options,
    }
