"""A backend called as a run calls it: through the dispatcher, forward and backward."""

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops.operator import Operator, Outputs
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.ops.signature import Signature
from drivetrain.engine.ops_tuning.inputs import drawn_arguments

__all__ = ["Results", "arguments_on", "forward_and_backward", "peak_bytes"]

Results = dict[str, Tensor]
"""Outputs and gradients by the names that grades have: ``output 0``, ``gradient of x``."""


def arguments_on(signature: Signature, seed: int) -> dict[str, Any]:
    """Arguments of the call on its device, leaves where a gradient is wanted."""
    drawn = drawn_arguments(signature, torch.Generator().manual_seed(seed))
    return {
        name: value.detach().to(signature.device).requires_grad_(value.requires_grad)
        if isinstance(value, Tensor)
        else value
        for name, value in drawn.items()
    }


def forward_and_backward(operator: Operator, backend: str, given: Mapping[str, Any]) -> Callable[[], Results]:
    """One call of ``backend`` by name, and the gradients of what asks for one, as a function.

    Incoming gradients are drawn once, dense.
    """
    selection = Selection(requested={operator.name: backend})
    wanted = {name: one for name, one in given.items() if isinstance(one, Tensor) and one.requires_grad}
    incoming: list[Tensor] = []

    def call() -> Results:
        outputs = _all(selection.call(operator, **given))
        results = {f"output {number}": output.detach() for number, output in enumerate(outputs)}
        differentiable = [output for output in outputs if output.requires_grad]
        if not wanted or not differentiable:
            return results
        if not incoming:
            generator = torch.Generator().manual_seed(1)
            incoming.extend(_incoming(one, generator) for one in differentiable)
        gradients = torch.autograd.grad(differentiable, list(wanted.values()), incoming, allow_unused=True)
        for name, gradient in zip(wanted, gradients, strict=True):
            if gradient is not None:
                results[f"gradient of {name}"] = gradient
        return results

    return call


def _incoming(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator).to(like.dtype).to(like.device)


def _all(outputs: Outputs) -> Sequence[Tensor]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def peak_bytes(call: Callable[[], Results], device: str) -> int | None:
    """Bytes that a call needs at most beside what is there already, results included; None where nobody can tell.

    On a CPU these are pages of the process, so that what compiled code and libraries allocate is among them; the call
    must have been made before.
    """
    call()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call()
        torch.cuda.synchronize()
        del results
        return torch.cuda.max_memory_allocated() - before
    if not _give_back_freed_memory():
        return None
    resident = _status("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    results = call()
    peak = _status("VmHWM")
    del results
    return None if peak is None or resident is None else max(0, peak - resident)


def _give_back_freed_memory() -> bool:
    """Whether pages that malloc holds free have been given back, so that using them again counts."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True


def _status(name: str) -> int | None:
    """A field of ``/proc/self/status`` in bytes."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
