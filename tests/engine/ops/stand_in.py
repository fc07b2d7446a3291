"""What the stand-ins for other libraries share.

A stand-in has the signature of the library's function, in the version that its file names, refuses what the library's
documentation does not take, computes in plain torch, and does the library's damage: where that writes over what it was
given, so does the stand-in. It says nothing of the library's kernels.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

__all__ = ["gradients", "install", "rms_normed", "turned"]


def install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Make ``import`` find these names in modules of these names, and in none else of the library."""
    import sys

    for name, held in modules.items():
        module = ModuleType(name)
        module.__path__ = []  # a package without files: what is not here cannot be imported from elsewhere
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
        above, _, last = name.rpartition(".")
        if above in modules:
            setattr(sys.modules[above], last, module)


def gradients(
    formula: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    incoming: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Of ``formula`` of the inputs in fp32, each in the dtype of its input."""
    with torch.enable_grad():
        leaves = [one.detach().float().requires_grad_() for one in inputs]
        outputs = formula(*leaves)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        found = torch.autograd.grad(outputs, leaves, [one.float() for one in incoming], allow_unused=True)
    return tuple(
        torch.zeros_like(one) if of_one is None else of_one.to(one.dtype)
        for one, of_one in zip(inputs, found, strict=True)
    )


def rms_normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """In the dtype of x."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def turned(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    """(…, H, K) turned by (…, 1, R/2), the first R features of each head."""
    half = cosine.shape[-1]
    head, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = head[..., ::2], head[..., 1::2]
    else:
        first, second = head[..., :half], head[..., half:]
    pair = (first * cosine - second * sine, second * cosine + first * sine)
    out = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((out, rest), dim=-1)
