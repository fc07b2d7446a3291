"""Many grades: backends over the numerics grids of operators."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from drivetrain.engine.ops.numerics import Grade, grade
from drivetrain.engine.ops.operator import Backend, Operator
from drivetrain.errors import DrivetrainError

__all__ = ["DTYPES", "graded"]

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def graded(
    operators: Sequence[Operator],
    backends: Sequence[str],
    dtypes: Sequence[str],
    device: str,
    *,
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """A row for each backend and dtype of each operator: ``{"operator", "backend", "dtype", "cases", "refused",
    "problems", "worst"}``.

    Args:
        backends: names; empty: all.
        dtypes: keys of :data:`DTYPES`.
        device: ``cpu`` or ``cuda``.
        progress: told of each case before it is graded.

    Raises:
        DrivetrainError: before anything is graded: no such dtype or device.
    """
    for name in dtypes:
        if name not in DTYPES:
            raise DrivetrainError(f"--dtype {name} is none of {', '.join(DTYPES)}")
    if device not in ("cpu", "cuda"):
        raise DrivetrainError(f"--device {device} is neither cpu nor cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise DrivetrainError("--device cuda: torch sees no CUDA device here; use --device cpu")
    for one in operators:
        for backend in one.backends:
            if backends and backend.name not in backends:
                continue
            for name in dict.fromkeys(dtypes):
                cases = [case for case in one.cases() if DTYPES[name] in case.dtypes]
                grades: list[tuple[str, Grade]] = []
                for number, case in enumerate(cases, start=1):
                    progress(f"{one.name} {backend.name} {name}: case {number} of {len(cases)}, {case.name}")
                    grades.append((case.name, grade(one, backend, case, DTYPES[name], device=device)))
                yield _row(one, backend, name, grades)


def _row(one: Operator, backend: Backend, dtype: str, grades: Sequence[tuple[str, Grade]]) -> dict[str, Any]:
    ran = [(case, found) for case, found in grades if found.refused is None]
    figures = [(case, figure) for case, found in ran for figure in found.measured if figure.allowed > 0]
    worst = max(figures, key=lambda pair: pair[1].error / pair[1].allowed, default=None)
    return {
        "operator": one.name,
        "backend": backend.name,
        "dtype": dtype,
        "cases": len(ran),
        "refused": {case: found.refused for case, found in grades if found.refused is not None},
        "problems": [f"{case}: {problem}" for case, found in ran for problem in found.problems],
        "worst": None
        if worst is None
        else {
            "case": worst[0],
            "what": worst[1].what,
            "error": worst[1].error,
            "reference_error": worst[1].reference_error,
            "allowed": worst[1].allowed,
        },
    }
