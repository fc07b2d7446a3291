"""What the adapters share: which version of a library is installed, and reasons that do not depend on the operator."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from drivetrain.engine.ops.operator import refuse_dtypes
from drivetrain.engine.ops.signature import Signature

__all__ = ["HALVES", "Library", "hangs_on", "refuse_empty", "refuse_large", "served_by"]

HALVES = (torch.float16, torch.bfloat16)
_MOST_ELEMENTS = 2**31
Rule = Callable[[Signature], str | None]


@dataclass(frozen=True)
class Library:
    """A library that has kernels.

    Attributes:
        name: of its backends.
        distribution: what ``pip install`` calls it.
        mapped: the version, or the commit of its sources, whose arguments the adapters pass.
        oldest: versions below are refused; empty where versions cannot be compared.
    """

    name: str
    distribution: str
    mapped: str
    oldest: str = ""

    def installed(self) -> str | None:
        """The version that is installed; None where there is none. Nothing is imported."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def refuses(self) -> str | None:
        """Why it cannot be called here; None where it can."""
        found = self.installed()
        if found is None:
            return (
                f"{self.distribution} is not installed (pip install {self.distribution}; arguments are those of "
                f"{self.mapped})"
            )
        if self.oldest and _numbers(found) < _numbers(self.oldest):
            return f"{self.distribution} {found} is installed; arguments are those of {self.oldest} and later"
        return None

    def __str__(self) -> str:
        found = self.installed()
        return f"{self.distribution}, arguments of {self.mapped}, {found or 'not'} installed"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text.split("+")[0])[:3])


def served_by(
    library: Library, rule: Rule, dtypes: tuple[torch.dtype, ...], devices: Callable[[], tuple[str, ...]]
) -> Rule:
    """The predicate of a backend: what ``rule`` says of the operator, then device, dtypes and whether it is installed.

    Args:
        rule: why the library does not compute this call, wherever it ran.
        devices: types of devices, asked with every call.
    """

    def supports(signature: Signature) -> str | None:
        why = rule(signature)
        if why is None and signature.device not in devices():
            why = f"{library.name} has no {signature.device} device; it has {', '.join(devices())}"
        return why or refuse_dtypes(signature, *dtypes) or library.refuses()

    return supports


def refuse_empty(signature: Signature) -> str | None:
    """Why a library that launches as many programs as there are rows cannot serve; None where there are rows."""
    for name, one in signature.arguments:
        if 0 in one.shape:
            return f"{name} is empty, and what a launch of no programs does is not documented"
    return None


def refuse_large(signature: Signature) -> str | None:
    """Why a kernel that counts elements in 32 bits cannot serve; None where it can."""
    for name, one in signature.arguments:
        elements = torch.Size(one.shape).numel()
        if elements >= _MOST_ELEMENTS:
            return f"{name} has {elements:,} elements; its kernel counts them in 32 bits"
    return None


def hangs_on(output: Tensor, *inputs: Tensor | None) -> Tensor:
    """``output``, which has to have a gradient where one of its inputs wants one.

    A library's function without a formula for its gradient returns a constant, and training goes on without it.
    """
    wanted = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in inputs)
    assert output.requires_grad or not wanted, "the library's result has no gradient"
    return output
