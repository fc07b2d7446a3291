"""Parts of ``benchmarks/gpu.py`` on a CPU with a clock that is scripted, and what they have written."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from drivetrain.engine.ops.operator import Operator
from gpu_parts.clock import Budget, Call, DryClock, Turn
from gpu_parts.context import Context
from gpu_parts.record import Record

CPU = torch.device("cpu")


class Scripted(DryClock):
    """Runs every call and answers with the next time of a script, over and over."""

    def __init__(self, script: Iterable[float] = (1.0,), periods: Iterable[float] = (0.5,)) -> None:
        self._script = itertools.cycle(script)
        self._periods = list(periods)
        self.results: list[Any] = []

    def turn(self, call: Call, repeats: int) -> Turn:
        self.results.append(call())
        return Turn([next(self._script)] * repeats, 0.001)

    def periods(self, step: Call, budget: Budget, *, warm: int, least: int, most: int) -> list[float]:
        step()
        return self._periods

    def peak_bytes(self, call: Call) -> int | None:
        call()
        return 7 << 20


def context_in(
    folder: Path, clock: Any = None, *, seconds: float = 600.0, peak: float | None = None
) -> Context:
    return Context(
        dry=False,
        device=CPU,
        clock=clock or Scripted(),
        budget=Budget.of(seconds),
        record=Record(folder / "part.json", "part"),
        peak=peak,
    )


def rows_of(context: Context, **given: Any) -> list[dict[str, Any]]:
    """The rows in the file that have these values."""
    rows = json.loads(context.record.path.read_text())["rows"]
    return [row for row in rows if all(row[name] == value for name, value in given.items())]


def with_backends(operator: Operator, **calls: Callable[..., Any]) -> Operator:
    """The operator with its eager backend and others by name; ``...`` computes what eager does."""
    eager = operator.backend("eager")
    assert eager is not None
    others = (
        dataclasses.replace(eager, name=name, call=eager.call if call is ... else call)
        for name, call in calls.items()
    )
    return dataclasses.replace(operator, backends=(eager, *others), untuned={})
