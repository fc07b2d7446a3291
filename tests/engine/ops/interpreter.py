"""Triton's interpreter on a CPU, as tests use it: a process of its own, and bf16 that computes.

The interpreter keeps bf16 as its bits in uint16 and does arithmetic on those; fp32 becomes bf16 by cutting bits off.
Both are known upstream and stay (triton-lang/triton issues 11585 and 4972). :func:`use_exact_bfloat16` puts a
builder in the place of a few of its methods that widens to fp32, computes, and rounds to nearest even. It changes
private names of triton 3.9; where one is gone, :func:`missing_patch_points` says so and tests are to skip with that
reason.

Usable from a script that runs with ``TRITON_INTERPRET=1`` from its start; :func:`run_interpreted` starts one.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["missing_patch_points", "run_interpreted", "triton_is_installed", "use_exact_bfloat16"]

PATCHED = ("cast_impl", "create_fp_to_fp", "binary_op", "unary_op", "create_dot")
NO_PATCH_POINTS = 77
"""Exit code of a script that cannot run as its patch points are gone."""


def triton_is_installed() -> bool:
    """Nothing is imported."""
    return importlib.util.find_spec("triton") is not None


def missing_patch_points() -> list[str]:
    """Names of triton's interpreter that this file needs and that are gone."""
    from triton.runtime import interpreter

    builder = getattr(interpreter, "InterpreterBuilder", None)
    missing = [name for name in ("InterpreterBuilder", "TensorHandle") if not hasattr(interpreter, name)]
    return missing + [name for name in PATCHED if not hasattr(builder, name)]


def rounded_to_bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bits of the nearest bf16, ties to even; not-a-number stays one."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    nearest = ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def widened(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """fp32 values of bf16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def use_exact_bfloat16() -> None:
    """Make the interpreter of this process compute in bf16. Ends the process where triton's names are gone."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set before Python starts"
    missing = missing_patch_points()
    if missing:
        print(f"this triton's interpreter has no {', '.join(missing)}", file=sys.stderr)
        sys.exit(NO_PATCH_POINTS)
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain = {name: getattr(builder, name) for name in PATCHED}

    def is_bfloat16(value: Any) -> bool:
        return bool(value.dtype.scalar == tl.bfloat16)

    def wide(value: Any) -> Any:
        return handle(widened(value.data), tl.float32) if is_bfloat16(value) else value

    def narrow(data: np.ndarray[Any, Any]) -> Any:
        return handle(rounded_to_bfloat16(data), tl.bfloat16)

    def cast(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and not is_bfloat16(source):
            return narrow(source.data.astype(np.float32))
        if is_bfloat16(source) and target.scalar == tl.float32:
            return wide(source)
        return plain["cast_impl"](self, wide(source), target)

    def float_to_float(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if is_bfloat16(source) or target.scalar == tl.bfloat16:
            return cast(self, source, target)
        return plain["create_fp_to_fp"](self, source, target, rounding)

    def binary(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> Any:
        if not is_bfloat16(left):
            return plain["binary_op"](self, left, right, operation)
        result = operation(widened(left.data), widened(right.data))
        return handle(result, tl.int1) if result.dtype == np.bool_ else narrow(result)

    def unary(self: Any, value: Any, operation: Callable[..., Any]) -> Any:
        if not is_bfloat16(value):
            return plain["unary_op"](self, value, operation)
        return narrow(operation(widened(value.data)))

    def dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return plain["create_dot"](self, wide(left), wide(right), *rest)

    for name, ours in zip(PATCHED, (cast, float_to_float, binary, unary, dot), strict=True):
        setattr(builder, name, ours)


def run_interpreted(script: Path, *arguments: str, timeout_s: float = 800.0) -> Any:
    """Run a script in the interpreter; what it printed on its last line, as JSON.

    Skips the calling test where triton is missing, or where the script says that its patch points are gone.
    """
    import pytest

    if not triton_is_installed():
        pytest.skip("triton is not installed: pip install triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode == NO_PATCH_POINTS:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
