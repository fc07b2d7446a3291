"""What a process that tries backends does: grade one, or time several side by side.

Whatever goes wrong ends the process, and is the tuner's to see: what crashes or hangs takes no tuner with it.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from drivetrain.engine.devices import set_threads
from drivetrain.engine.memory.host import keep_freed_memory
from drivetrain.engine.ops.operator import Operator
from drivetrain.engine.ops_tuning.described import signature_from
from drivetrain.engine.ops_tuning.grading import grade_call
from drivetrain.engine.ops_tuning.timing import time_backends
from drivetrain.engine.random_state import set_deterministic

__all__ = ["answer"]


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for. Sets threads and seed of the process.

    Args:
        request: ``{"do", "module", "call", "threads", "deterministic", "keep_freed_memory"}``; with ``do`` = ``grade``
            also ``{"backend", "tokens"}``, with ``time`` ``{"backends", "rounds", "allowed"}``.
    """
    if request["keep_freed_memory"]:
        keep_freed_memory()
    set_threads(request["threads"])
    set_deterministic(request["deterministic"])
    torch.manual_seed(0)
    operator = importlib.import_module(request["module"]).OPERATOR
    assert isinstance(operator, Operator)
    signature = signature_from(request["call"])
    if request["do"] == "grade":
        return grade_call(operator, request["backend"], signature, request["tokens"])
    return time_backends(
        operator, request["backends"], signature, rounds=request["rounds"], allowed=request["allowed"]
    )
