"""What a call of an operator looks like: shapes, dtypes and options, without values."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Argument", "Signature", "is_tensor_list", "named_tensors", "signature_of"]


@dataclass(frozen=True)
class Argument:
    """A tensor argument.

    Attributes:
        shape: its sizes.
        dtype: of its elements.
        contiguous: whether its elements lie in row-major order without gaps.
        requires_grad: whether its gradient is wanted.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool
    requires_grad: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, self.shape))}]{'' if self.contiguous else ' with gaps'}"


@dataclass(frozen=True)
class Signature:
    """A call, as a backend decides by it whether it can serve.

    Attributes:
        operator: its name.
        device: type of the device of all tensors, ``cpu``, ``cuda`` or ``meta``.
        arguments: the tensor arguments by name, in the order of the reference; those of a list of tensors are
            ``<name>[0]``, ``<name>[1]`` …
        options: all other arguments by name.
    """

    operator: str
    device: str
    arguments: tuple[tuple[str, Argument], ...]
    options: tuple[tuple[str, Hashable], ...]

    def argument(self, name: str) -> Argument | None:
        """The tensor argument of that name; None where none was given."""
        return dict(self.arguments).get(name)

    def members(self, name: str) -> tuple[Argument, ...]:
        """The tensors of the list of that name; none where none was given."""
        return tuple(one for member, one in self.arguments if member.startswith(f"{name}["))

    def option(self, name: str) -> Hashable:
        """The option of that name; None where none was given."""
        return dict(self.options).get(name)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of its floating-point arguments, each once."""
        return tuple(dict.fromkeys(one.dtype for _, one in self.arguments if one.dtype.is_floating_point))

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient of any argument is wanted."""
        return any(one.requires_grad for _, one in self.arguments)

    def __str__(self) -> str:
        # Of a list of hundreds of tensors the first is shown.
        parts = [
            f"{name}={one}{self._more(name)}"
            for name, one in self.arguments
            if not name.endswith("]") or name.endswith("[0]")
        ]
        parts += [f"{name}={one}" for name, one in self.options]
        return f"{self.operator}({', '.join(parts)}) on {self.device}"

    def _more(self, name: str) -> str:
        others = len(self.members(name.removesuffix("[0]"))) - 1 if name.endswith("[0]") else 0
        return f" and {others} more" if others else ""


def is_tensor_list(value: object) -> bool:
    """Whether an argument is a tuple or list of tensors, of at least one."""
    return isinstance(value, tuple | list) and bool(value) and all(isinstance(one, Tensor) for one in value)


def named_tensors(given: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """All tensors among these arguments with their names in a :class:`Signature`."""
    found: list[tuple[str, Tensor]] = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            found.append((name, value))
        elif is_tensor_list(value):
            for number, member in enumerate(value):
                found.append((f"{name}[{number}]", member))
    return found


def signature_of(operator: str, given: Mapping[str, Any]) -> Signature:
    """The signature of a call with these arguments, ``None`` among them left out.

    Tensors count as wanting a gradient only where gradients are being recorded.
    """
    recording = torch.is_grad_enabled()
    tensors: list[tuple[str, Argument]] = []
    devices: set[str] = set()
    for name, value in named_tensors(given):
        devices.add(value.device.type)
        wanted = recording and value.requires_grad
        tensors.append((name, Argument(tuple(value.shape), value.dtype, value.is_contiguous(), wanted)))
    options: list[tuple[str, Hashable]] = [
        (name, value)
        for name, value in given.items()
        if value is not None and not isinstance(value, Tensor) and not is_tensor_list(value)
    ]
    assert len(devices) == 1, f"{operator} was given tensors on {sorted(devices) or 'no device'}"
    return Signature(operator, devices.pop(), tuple(tensors), tuple(options))
