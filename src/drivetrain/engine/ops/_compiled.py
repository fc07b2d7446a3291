"""Formulas compiled by Inductor: lazily, and one compilation for each layout of the arguments.

torch.compile keeps what it compiled on the code object of a function and recompiles there for other shapes until a
limit of 8, behind which it would go on uncompiled or fail. A formula is called with every shape of a model, so each
layout has a copy of the function with a code object of its own, and none is ever served by another's dynamic shapes.
"""

import functools
import os
import shutil
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from drivetrain.engine.ops.operator import refuse_dtypes
from drivetrain.engine.ops.signature import Signature
from drivetrain.errors import DrivetrainError

__all__ = ["MOST_LAYOUTS", "compiled", "inductor_refuses", "sum_of_rows"]

Result = TypeVar("Result")

MOST_LAYOUTS = 256
"""Compilations of one formula in a process. Each takes seconds: a call whose shapes never repeat is a mistake."""


def compiled(formula: Callable[..., Result]) -> Callable[..., Result]:
    """``formula``, compiled on its first call with each layout; inside compiled code, inlined there.

    Args:
        formula: takes tensors, None and hashable options by position; its Python runs while compiling alone.

    Raises:
        DrivetrainError: when called, where it was compiled for :data:`MOST_LAYOUTS` other layouts before.
    """
    variants: dict[Any, Callable[..., Result]] = {}

    @functools.wraps(formula)
    def call(*arguments: Any) -> Result:
        if torch.compiler.is_compiling():
            return formula(*arguments)
        recording = torch.is_grad_enabled()
        if not recording:
            # Whether a gradient is wanted says nothing then, and would compile once more.
            arguments = tuple(one.detach() if isinstance(one, Tensor) else one for one in arguments)
        key = (recording, *map(_layout, arguments))
        variant = variants.get(key)
        if variant is None:
            if len(variants) >= MOST_LAYOUTS:
                raise DrivetrainError(
                    f"inductor has compiled {formula.__name__} for {MOST_LAYOUTS} different shapes in this process, "
                    "and meets another one: pad to a few sizes, or use the backend eager"
                )
            variant = torch.compile(_with_code_of_its_own(formula), dynamic=False, fullgraph=True)
            variants[key] = variant
        return variant(*arguments)

    return call


def _layout(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return (argument.shape, argument.stride(), argument.dtype, argument.device, argument.requires_grad)
    return argument


def _with_code_of_its_own(formula: Callable[..., Result]) -> Callable[..., Result]:
    assert isinstance(formula, types.FunctionType)
    copied = types.FunctionType(
        formula.__code__.replace(),
        formula.__globals__,
        formula.__name__,
        formula.__defaults__,
        formula.__closure__,
    )
    copied.__module__ = formula.__module__
    return copied


def inductor_refuses(signature: Signature) -> str | None:
    """Why Inductor cannot serve a call on this machine; None where it can."""
    missing: str | None = _missing_while_tracing_too(signature.device)
    if missing is not None:
        return missing
    return refuse_dtypes(signature, torch.float32, torch.bfloat16, torch.float16, torch.float64)


# What a machine lacks is no part of a graph: traced, the look for it would break each one that calls an operator.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _missing_while_tracing_too(device: str) -> str | None:
    found: str | None = _missing(device)
    return found


@functools.cache
def _missing(device: str) -> str | None:
    if device == "cuda":
        from importlib.util import find_spec

        return (
            None
            if find_spec("triton") is not None
            else "Triton is missing, which Inductor needs on a CUDA device"
        )
    if device != "cpu":
        return f"it was never tried on a device of type {device}"
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name.split()[0]) is None:
        return f"there is no C++ compiler {name}"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return None if header.is_file() else f"{header} is missing, the Python headers"


def sum_of_rows(values: Tensor) -> Tensor:
    """``values.sum(0)`` of a matrix in two stages, so that its error grows with the fourth root of the rows.

    Compiled code adds rows one after the other. Of 131,072 rows in fp32 that is off by 1.6e-6 where torch's own sum in
    cascades is off by 1.8e-7; blocks of about the square root, and then the blocks, are as good as the latter.
    """
    rows, columns = values.shape
    in_block = 1 << (max(rows, 1).bit_length() // 2)
    whole = rows // in_block * in_block
    total = values[:whole].view(-1, in_block, columns).sum(1).sum(0)
    return total if whole == rows else total + values[whole:].sum(0)
