"""The part ``numerics`` of ``benchmarks/gpu.py``: what it grades, what it leaves out, and what breaks."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from played_gpu import context_in, rows_of

from drivetrain.engine.ops.operator import Backend, Case, Operator, serves_all
from gpu_parts import numerics_part
from gpu_parts.clock import Budget
from gpu_parts.context import Context


def doubled(cases: int, wrong_in: int | None = None, fails_in: int | None = None) -> Operator:
    """``y = 2 x``, by eager and by another that is off, or raises, in one case."""

    def make(number: int) -> Callable[[torch.dtype, torch.Generator], dict[str, Any]]:
        return lambda dtype, generator: {"x": torch.randn(number + 2, 3, generator=generator).to(dtype)}

    def other(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] - 2 == fails_in:
            raise RuntimeError("it broke")
        return 2.5 * x if x.shape[0] - 2 == wrong_in else 2 * x

    return Operator(
        name="doubled",
        equation="y = 2 x",
        source="here",
        reference=lambda x: 2 * x,
        cases=lambda: [Case(f"case {number}", make(number)) for number in range(cases)],
        backends=(Backend("eager", lambda x: 2 * x, serves_all), Backend("triton", other, serves_all)),
    )


def numerics_of(
    operator: Operator, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 600.0
) -> Context:
    monkeypatch.setattr(numerics_part, "operators", lambda: (operator,))
    context = context_in(folder, seconds=seconds)
    numerics_part.run(context)
    return context


def test_every_backend_and_dtype_is_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = numerics_of(doubled(3), tmp_path, monkeypatch)
    rows = [
        (row["what"], row["backend"], row["verdict"], row["figures"]["cases"]) for row in rows_of(context)
    ]
    assert rows == [
        (f"doubled {dtype}", backend, "right", 3)
        for dtype in ("bf16", "fp32", "fp16")
        for backend in ("triton", "eager")
    ]


def test_a_wrong_case_makes_a_backend_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = numerics_of(doubled(3, wrong_in=1), tmp_path, monkeypatch)
    wrong = rows_of(context, verdict="wrong")
    assert {row["backend"] for row in wrong} == {"triton"}
    assert wrong[0]["said"].startswith("WRONG in 3 cases")
    assert wrong[0]["figures"]["problems"][0].startswith("case 1: output 0")
    assert wrong[0]["figures"]["worst"]["case"] == "case 1"


def test_a_case_that_raises_is_a_row_and_the_others_are_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = numerics_of(doubled(3, fails_in=1), tmp_path, monkeypatch)
    failed = rows_of(context, verdict="failed", what="doubled bf16: case 1")
    assert [row["said"] for row in failed] == ["RuntimeError: it broke"]
    (row,) = rows_of(context, what="doubled bf16", backend="triton")
    assert (row["verdict"], row["figures"]["cases"]) == ("right", 2)


def test_cases_without_time_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = numerics_of(doubled(3), tmp_path, monkeypatch, seconds=0)
    assert not rows_of(context)
    said = json.loads(context.record.path.read_text())["left_out"]
    assert "doubled bf16, triton: 3 cases, time was up" in said
    assert len(said) == 6


class TwoLooks(Budget):
    """Is spent from the third look on."""

    looks: ClassVar[list[int]] = []

    @property
    def spent(self) -> bool:
        self.looks.append(1)
        return len(self.looks) > 2


def test_what_was_graded_before_time_was_up_is_a_row_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwoLooks, "looks", [])
    monkeypatch.setattr(numerics_part, "operators", lambda: (doubled(5),))
    context = dataclasses.replace(context_in(tmp_path), budget=TwoLooks(0.0))
    numerics_part.run(context)
    (row,) = rows_of(context)
    assert (row["what"], row["backend"], row["figures"]["cases"]) == ("doubled bf16", "triton", 2)
    assert context.record.left_out[0] == "doubled bf16, triton: 3 cases, time was up"
