"""What every part is given, and what parts have in common."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from drivetrain.engine.ops.operator import Backend, Operator
from drivetrain.engine.ops.signature import signature_of
from gpu_parts.clock import Budget, Call, Clock
from gpu_parts.record import Record, Row

__all__ = [
    "COMPILES",
    "Context",
    "attempt",
    "difference",
    "drawn_by",
    "gradients_call",
    "is_ours",
    "servers",
    "tensors_of",
]

COMPILES = ("inductor", "flex")
"""Backends that compile anew for each layout, seconds each: last where time is short, and not in a dry run."""

_NOT_OURS = ("eager", "dense", *COMPILES)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Context:
    """Of a part.

    Attributes:
        dry: tiny sizes on a CPU, no figures.
        device: where everything runs.
        peak: FLOP/s that the user gave; None: none.
    """

    dry: bool
    device: torch.device
    clock: Clock
    budget: Budget
    record: Record
    peak: float | None = None

    def generator(self) -> torch.Generator:
        """A new one on the device, seeded."""
        return torch.Generator(self.device).manual_seed(0)


def attempt(context: Context, what: str, backend: str, call: Callable[[], Result]) -> Result | None:
    """``call()``; where it fails, a row says so and None is returned.

    Raises:
        RuntimeError: what failed has left the device unusable: the part can only end.
    """
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - one backend's failure, whatever it is, is a row of the table
        text = (str(error).strip().splitlines() or [""])[0]
        failed = Row(what, backend, f"{type(error).__name__}: {text}"[:300], "failed")
    # Outside of the handler, which holds on to the frames of what failed, and their memory.
    context.record.add(failed)
    gc.collect()
    context.clock.settle()
    return None


def is_ours(operator: Operator, backend: Backend) -> bool:
    """Whether it is our own code: not torch's operators, its compiler, or another library.

    Where we have no code of our own, what Inductor makes of our formula is ours.
    """
    own = {
        one.name
        for one in operator.backends
        if (not one.library or one.library.startswith("triton")) and one.name not in _NOT_OURS
    }
    return backend.name in (own or {"inductor"})


def servers(context: Context, operator: Operator, what: str, given: Mapping[str, Any]) -> list[Backend]:
    """The backends that serve a call; of the others a row says why not."""
    found = []
    signature = signature_of(operator.name, given)
    for backend in operator.backends:
        why = backend.supports(signature)
        if why is not None:
            context.record.add(Row(what, backend.name, why, "refused", is_ours(operator, backend)))
        elif context.dry and backend.name in COMPILES:
            context.record.leave_out(f"{what}, {backend.name}", "a dry run compiles nothing")
        else:
            found.append(backend)
    return found


def drawn_by(context: Context, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function from a shape to normal numbers on the device that want a gradient."""
    generator = context.generator()

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=context.device, dtype=torch.float32)
        return values.to(dtype).requires_grad_()

    return drawn


def tensors_of(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Outputs of any operator as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def gradients_call(call: Callable[[], Any], leaves: Sequence[Tensor], incoming: Sequence[Tensor]) -> Call:
    """Forward and backward in one: the outputs and the gradients of ``leaves``."""

    def both() -> tuple[Tensor, ...]:
        outputs = tensors_of(call())
        wanted = [one for one in outputs if one.requires_grad]
        used = [gradient for one, gradient in zip(outputs, incoming, strict=True) if one.requires_grad]
        return (*(one.detach() for one in outputs), *torch.autograd.grad(wanted, leaves, used))

    return both


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest root mean square of a difference over that of what is expected; infinite where shapes differ."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return float("inf")
        right = other.float()
        size = float(right.square().mean().sqrt())
        error = float((one.float() - right).square().mean().sqrt())
        # Not-a-number compares as nothing: it is as wrong as can be.
        error = error / size if size else error
        worst = max(worst, error if error == error else float("inf"))
    return worst
