"""The mapping to Liger-Kernel against the library itself, where it is installed: its signatures, and its kernels in
Triton's interpreter. That is no device: what it shows of a GPU is the mathematics alone.
"""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import stand_in_liger
from interpreter import run_interpreted

from drivetrain.engine.ops.adapters import liger
from drivetrain.engine.ops.discovery import operator_named

CALLS = [(module, name) for module, held in stand_in_liger.MODULES.items() for name in held]
GRID = Path(__file__).with_name("interpreted_liger.py")
SLOW = ("many rows", "long rows", "many words")


@pytest.fixture
def library() -> None:
    why = liger.LIBRARY.refuses()
    if why is not None:
        pytest.skip(why)


def parameters(call: Any) -> list[tuple[str, Any]]:
    """Names and defaults; the context of a gradient's function left out."""
    found = inspect.signature(getattr(call, "forward", call)).parameters
    return [(name, one.default) for name, one in found.items() if name != "ctx"]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("module", "name"), CALLS)
def test_stand_ins_have_the_signatures_of_the_library(module: str, name: str) -> None:
    real = getattr(importlib.import_module(module), name)
    # A version may add parameters behind those that are known.
    known = parameters(stand_in_liger.MODULES[module][name])
    assert parameters(real)[: len(known)] == known


def interpreted(calls: list[tuple[str, str, str, str]]) -> list[str]:
    """What is wrong with each call, by the interpreter's process."""
    found = run_interpreted(GRID, json.dumps(calls), timeout_s=1700.0)
    assert len(found) == len(calls)
    problems = []
    for call, one in zip(calls, found, strict=True):
        assert one["refused"] or one["measured"] or one["problems"]
        problems += [f"{' '.join(call)}: {problem}" for problem in one["problems"]]
    assert any(one["measured"] for one in found)
    return problems


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", liger.RULES)
def test_its_kernels_in_the_interpreter_are_as_near_to_float64_as_the_reference(name: str) -> None:
    calls = []
    for number, case in enumerate(operator_named(name).cases()):
        if case.name not in SLOW:
            dtype = ("float32", "bfloat16", "float16")[number % 3]
            calls.append((name, case.name, dtype, ("dense", "expanded", "transposed")[number // 3 % 3]))
    assert interpreted(calls) == []
