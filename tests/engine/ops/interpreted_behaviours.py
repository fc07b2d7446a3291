"""Behaviours of the Triton backends in the interpreter: a script, run by tests in a process of its own.

Prints as JSON what failed, by operator and behaviour, and how many checks were made.
"""

import json
import sys
import traceback
from collections.abc import Callable

import torch
from elementwise_behaviours import BEHAVIOURS, CALLS, a_gradient_of_a_gradient_is_refused, call_of
from interpreter import use_exact_bfloat16

from drivetrain.engine.ops.discovery import operator_named


def custom_operators_pass_torchs_own_checks(name: str, backend: str) -> None:
    """Schema, registered gradient, shapes without data, and tracing (torch.library.opcheck)."""
    import torch.library

    call, given = call_of(name, backend)
    recorded: list[tuple[torch._ops.OpOverload, tuple[object, ...]]] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        """Keeps the calls of our operators with copies of their arguments."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "drivetrain":
                copies = [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in args]
                recorded.append((func, tuple(copies)))
            return func(*args, **(kwargs or {}))

    with Recorder():
        outputs = call(**given)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    assert len({func for func, _ in recorded}) >= 1
    for func, args in recorded:
        # Those that autograd goes through are checked with gradients; those of a backward have none of their own.
        is_forward = not func._schema.name.split("::")[1].startswith(("norm_backward", "glu_backward"))
        if is_forward:
            for one in args:
                if isinstance(one, torch.Tensor) and one.is_floating_point():
                    one.requires_grad_()
        if func._schema.name == "drivetrain::rotary":
            # Angles have no gradient.
            for one in args[1:3]:
                one.requires_grad_(False)
        torch.library.opcheck(func, args)


def rows_of_a_huge_stride_are_found(name: str, backend: str) -> None:
    """Offsets in 32 bits wrap at 2^31 elements (Liger-Kernel 1483, fla 1080). Memory that is not touched costs
    nothing."""
    stride, rows = (1 << 30) + 64, 3
    if name not in ("rotary", "glu"):
        # Norms read contiguous copies, so that a stride never reaches their kernels.
        return
    wide = torch.empty(stride * (rows - 1) + 64, dtype=torch.float16)
    drawn = torch.randn(rows, 64, generator=torch.Generator().manual_seed(3)).half()
    operator = operator_named(name)
    triton = operator.backend(backend)
    assert triton is not None
    if name == "glu":
        apart = wide.as_strided((rows, 64), (stride, 1))
        apart.copy_(drawn)
        found, wanted = triton.call(gate=apart), operator.reference(gate=drawn)
    else:
        apart = wide.as_strided((rows, 4, 16), (stride, 16, 1))
        apart.copy_(drawn.view(rows, 4, 16))
        angles = torch.linspace(-3, 3, rows * 8).view(rows, 8)
        found = triton.call(x=apart, cosine=angles.cos(), sine=angles.sin())
        wanted = operator.reference(x=drawn.view(rows, 4, 16), cosine=angles.cos(), sine=angles.sin())
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


CHECKS: tuple[Callable[[str, str], None], ...] = (
    *BEHAVIOURS,
    a_gradient_of_a_gradient_is_refused,
    custom_operators_pass_torchs_own_checks,
    rows_of_a_huge_stride_are_found,
)


def main() -> None:
    """The script."""
    use_exact_bfloat16()
    torch.set_num_threads(1)
    failed, made = {}, 0
    for name in CALLS:
        if operator_named(name).backend("triton") is None:
            continue
        for check in CHECKS:
            made += 1
            try:
                check(name, "triton")
            except Exception:  # noqa: BLE001 - whatever it was, the test shows it
                failed[f"{name}: {check.__name__}"] = traceback.format_exc()[-1500:]
    print(json.dumps({"failed": failed, "made": made}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
