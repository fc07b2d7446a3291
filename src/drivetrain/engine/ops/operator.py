"""What an operator is: a readable reference with its equation, a contract, and backends that compute the same."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops.signature import Signature

__all__ = ["FLOOR", "OUTPUT_FACTOR", "Backend", "Case", "Operator", "Outputs", "refuse_dtypes", "serves_all"]

Outputs = Tensor | tuple[Tensor, ...]

OUTPUT_FACTOR = 3.0
"""A backend's error against float64 may be this many times the reference's own in the same dtype."""

FLOOR: Mapping[torch.dtype, float] = {
    torch.bfloat16: 1.7e-3,
    torch.float16: 2.1e-4,
    torch.float32: 3e-7,
    torch.float64: 1e-15,
}
"""Errors that rounding a result once makes, and a little more."""


@dataclass(frozen=True)
class Backend:
    """One way of computing an operator.

    Attributes:
        name: ``eager``, ``inductor``, ``triton``, ``liger`` …
        call: takes the arguments of the operator's reference, by name.
        supports: None where it can serve a call, else why it cannot.
        library: what it is made of, with the version; empty for torch itself.
        ran_on: device types it was run on by us, with its numerics graded. Anything else is said to be untried.
        deterministic: two calls with the same arguments give the same bits.
        kernels: parts of the names of device kernels or profiler regions by which a profile shows it.
    """

    name: str
    call: Callable[..., Outputs]
    supports: Callable[[Signature], str | None]
    library: str = ""
    ran_on: tuple[str, ...] = ()
    deterministic: bool = True
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A call of the numerics grid.

    Attributes:
        name: what is particular about it.
        make: its arguments by name, floating-point ones in the given dtype, drawn from the generator on a CPU. Those
            that are to have gradients require them.
        dtypes: in which it is tried.
    """

    name: str
    make: Callable[[torch.dtype, torch.Generator], dict[str, Any]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Operator:
    """What is computed, and by whom.

    Attributes:
        name: in configurations (``fusion.<name>``), reports and ``ops list``.
        equation: what it computes, in one line of text.
        source: paper or document it is from.
        reference: plain torch, in the dtypes of its arguments; in float64 the truth.
        cases: the numerics grid, odd and extreme shapes and values included.
        backends: the simplest first; ``eager`` is always one.
        untuned: for a type of device the backends that ``auto`` tries where nothing was tuned, the most preferred
            first; ``eager`` where none of them can serve, and on other devices. A preference is a measurement of ours,
            and its place says which.
        factor: bound on a backend's error over the reference's own (see :data:`OUTPUT_FACTOR`).
        floor: for each dtype the error up to which nothing is said, relative root mean square.
    """

    name: str
    equation: str
    source: str
    reference: Callable[..., Outputs]
    cases: Callable[[], Iterable[Case]]
    backends: tuple[Backend, ...]
    factor: float = OUTPUT_FACTOR
    floor: Mapping[torch.dtype, float] = field(default_factory=lambda: FLOOR)
    untuned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [backend.name for backend in self.backends]
        assert "eager" in names, f"{self.name} has no eager backend"
        assert len(set(names)) == len(names), f"{self.name} has two backends of one name"
        preferred = {name for of_device in self.untuned.values() for name in of_device}
        assert preferred <= set(names), (
            f"{self.name} prefers backends that it has not: {preferred - set(names)}"
        )

    def backend(self, name: str) -> Backend | None:
        """The backend of that name."""
        return next((one for one in self.backends if one.name == name), None)


def refuse_dtypes(signature: Signature, *allowed: torch.dtype) -> str | None:
    """Why a backend that knows only these dtypes cannot serve; None where it can."""
    others = [str(dtype).removeprefix("torch.") for dtype in signature.dtypes if dtype not in allowed]
    if not others:
        return None
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    return f"{others[0]} is not among its dtypes: {known}"


def serves_all(_: Signature) -> str | None:
    """The predicate of a backend that serves every call."""
    return None
