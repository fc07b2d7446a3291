"""Grades Liger-Kernel's own kernels in the interpreter: a script, run by tests in a process of its own.

    TRITON_INTERPRET=1 python interpreted_liger.py '[["glu", "odd sizes", "float32", "dense"], ...]'

prints the problems of each call as JSON. What Liger's kernels call of a device's library, the interpreter has not:
those functions are given here, as are numbers that a launch makes of Python's.
"""

import json
import sys

import numpy as np
import torch
import triton
import triton.language as tl
from interpreter import use_exact_bfloat16
from triton.language.extra import libdevice
from triton.runtime import interpreter

from drivetrain.engine.ops.discovery import operator_named
from drivetrain.engine.ops.numerics import grade


@triton.jit
def rsqrt(x):  # type: ignore[no-untyped-def]
    """Of a device's library."""
    return 1.0 / tl.sqrt(x.to(tl.float32))


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """Of a device's library."""
    return 2 * tl.sigmoid(2 * x) - 1


def use_functions_of_a_device() -> None:
    """Before Liger is imported: it takes them by name."""
    libdevice.rsqrt, libdevice.tanh = rsqrt, tanh
    plain = interpreter._implicit_cvt

    def converted(given: object) -> object:
        if isinstance(given, float):
            handle = interpreter.TensorHandle(np.array([given], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return plain(given)

    interpreter._implicit_cvt = converted


def main() -> None:
    """The script."""
    use_exact_bfloat16()
    use_functions_of_a_device()
    torch.set_num_threads(1)
    found = []
    for name, case_name, dtype_name, upstream in json.loads(sys.argv[1]):
        operator = operator_named(name)
        backend = operator.backend("liger")
        assert backend is not None
        case = next(case for case in operator.cases() if case.name == case_name)
        graded = grade(operator, backend, case, getattr(torch, dtype_name), upstream=upstream)
        found.append(
            {"refused": graded.refused, "problems": graded.problems, "measured": len(graded.measured)}
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
