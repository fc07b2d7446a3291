"""Calls, operators and answers that several tests of the tuner share; children of the tuner import this, too."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops import rms_norm
from drivetrain.engine.ops.operator import Backend, Operator, serves_all
from drivetrain.engine.ops.signature import Argument, Signature
from drivetrain.engine.ops_tuning.processes import Answer
from drivetrain.engine.ops_tuning.recording import RecordedCall

FOLDER = Path(__file__).resolve().parent
MODULE = "tuning_examples"
"""By which children import the operator below, with this folder on their path."""


def norm_call(tokens: int = 24, width: int = 16, **changes: Any) -> Signature:
    """A call of ``rms_norm``; ``changes`` are of the argument x."""
    x = replace(Argument((tokens, width), torch.float32, True, True), **changes)
    weight = Argument((width,), torch.float32, True, True)
    return Signature("rms_norm", "cpu", (("x", x), ("weight", weight)), (("epsilon", 1e-5),))


def recorded(signature: Signature, operator: Operator | None = None, count: float = 3.0) -> RecordedCall:
    return RecordedCall(operator or OPERATOR, signature, count)


def _right(**given: Any) -> Tensor:
    out = rms_norm.OPERATOR.reference(**given)
    assert isinstance(out, Tensor)
    return out


def _slow(**given: Any) -> Tensor:
    time.sleep(0.02)
    return _right(**given)


def _wrong(**given: Any) -> Tensor:
    return _right(**given) * 1.01


def _overwriting(**given: Any) -> Tensor:
    out = _right(**given)
    given["x"].data.mul_(2.0)  # past autograd, as a kernel does
    return out


def _wrong_when_odd(**given: Any) -> Tensor:
    """Right with an even number of tokens alone: what a kernel that takes two rows at once does at a border."""
    return _right(**given) * (1.0 if given["x"].shape[0] % 2 == 0 else 1.5)


def _crashing(**given: Any) -> Tensor:
    os.kill(os.getpid(), 11)
    return _right(**given)


def _hanging(**given: Any) -> Tensor:
    time.sleep(3600)
    return _right(**given)


def _raising(**given: Any) -> Tensor:
    raise RuntimeError("no kernel image is there for this device")


BAD: Mapping[str, Callable[..., Tensor]] = {
    "wrong": _wrong,
    "overwriting": _overwriting,
    "wrong_when_odd": _wrong_when_odd,
    "crashing": _crashing,
    "hanging": _hanging,
    "raising": _raising,
}

OPERATOR = replace(
    rms_norm.OPERATOR,
    backends=(
        Backend("eager", _slow, serves_all),
        Backend("quick", _right, serves_all),
        *(Backend(name, call, serves_all) for name, call in BAD.items()),
        Backend("elsewhere", _right, lambda _: "it needs another device"),
    ),
    untuned={},
)
"""RMSNorm with backends that are slow, quick, and wrong in each way."""


def with_backends(*names: str) -> Operator:
    """The operator with these backends alone."""
    return replace(OPERATOR, backends=tuple(one for one in OPERATOR.backends if one.name in names))


class Asked:
    """In the place of children: answers at once, without a process.

    Attributes:
        requests: all that were made.
        seconds: of a call, by backend; others take 1 s.
        problems: of a backend's grade, by name.
        after: called with the number of requests so far, before each answer.
    """

    def __init__(
        self,
        seconds: Mapping[str, float] | None = None,
        problems: Mapping[str, str] | None = None,
        after: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.seconds = dict(seconds or {})
        self.problems = dict(problems or {})
        self.after = after

    def __call__(self, request: Mapping[str, Any], *, limit_s: float) -> Answer:
        self.requests.append(request)
        self.after(len(self.requests))
        if request["do"] == "time":
            seconds = {name: [self.seconds.get(name, 1.0)] * 7 for name in request["backends"]}
            return Answer({"seconds": seconds, "problems": {}}, None, False, 0.1)
        name = request["backend"]
        found = {
            "problems": [self.problems[name]] if name in self.problems else [],
            "measured": [{"what": "output 0", "error": 1e-7, "allowed": 3e-7}],
            "peak_bytes": 1024,
        }
        return Answer(found, None, False, 0.1)
