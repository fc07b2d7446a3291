"""Part ``numerics``: every backend of every operator over its grid against float64, as ``drivetrain ops check`` does.

What compiles for each shape comes last, and bf16 first: where the time ends, the most used was graded.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drivetrain.engine.ops.discovery import operators
from drivetrain.engine.ops.grid import DTYPES, graded
from drivetrain.engine.ops.operator import Backend, Case, Operator
from gpu_parts.context import COMPILES, Context, attempt, is_ours
from gpu_parts.record import DRY, Row

__all__ = ["run"]

_ORDER = ("bf16", "fp32", "fp16")
_PLAIN = ("eager", "dense")
"""Torch's own operators: after what only exists on such a device."""
_DRY_CASES = 1


def run(context: Context) -> None:
    """Grade them all."""
    context.record.tell(rule="output and gradient errors as engine/ops/numerics.py bounds them")
    every = [(operator, backend) for operator in operators() for backend in operator.backends]
    quick = sorted(
        (pair for pair in every if pair[1].name not in COMPILES), key=lambda pair: pair[1].name in _PLAIN
    )
    slow = [pair for pair in every if pair[1].name in COMPILES]
    if context.dry:
        for operator, backend in slow:
            context.record.leave_out(f"{operator.name}, {backend.name}", "a dry run compiles nothing")
        context.record.leave_out("other dtypes than bf16, and all but the first case", DRY)
    for pairs in (quick,) if context.dry else (quick, slow):
        for dtype in _ORDER[:1] if context.dry else _ORDER:
            for operator, backend in pairs:
                _grade(context, operator, backend, dtype)


def _grade(context: Context, operator: Operator, backend: Backend, dtype: str) -> None:
    """A row for all cases that time is left for. Case by case: the failure of one is not that of the others."""
    what = f"{operator.name} {dtype}"
    cases = [case for case in operator.cases() if DTYPES[dtype] in case.dtypes]
    if context.dry:
        cases = cases[:_DRY_CASES]
    found: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        if context.budget.spent:
            context.record.leave_out(f"{what}, {backend.name}", f"{len(cases) - number} cases, time was up")
            break
        row = attempt(
            context,
            f"{what}: {case.name}",
            backend.name,
            lambda case=case: _graded(operator, backend, case, dtype, context.device.type),  # type: ignore[misc]
        )
        if row is not None:
            found.append(row)
    if found:
        context.record.add(row_of(what, operator, backend, found))


def _graded(operator: Operator, backend: Backend, case: Case, dtype: str, device: str) -> dict[str, Any]:
    alone = replace(operator, cases=lambda: (case,))
    (row,) = graded([alone], [backend.name], [dtype], device, progress=lambda _: None)
    return row


def row_of(what: str, operator: Operator, backend: Backend, found: Sequence[dict[str, Any]]) -> Row:
    """What the grades of single cases come to."""
    ran = sum(one["cases"] for one in found)
    refused = {case: why for one in found for case, why in one["refused"].items()}
    problems = [problem for one in found for problem in one["problems"]]
    ours = is_ours(operator, backend)
    if not ran:
        reasons = "; ".join(dict.fromkeys(refused.values()))
        return Row(what, backend.name, reasons, "refused", ours, figures={"refused": refused})
    worst = max(
        (one["worst"] for one in found if one["worst"] is not None),
        key=lambda one: one["error"] / one["allowed"],
        default=None,
    )
    said = f"{'WRONG' if problems else 'right'} in {ran} cases"
    if worst is not None:
        said += (
            f", worst {worst['error'] / worst['allowed']:.0%} of its bound ({worst['what']}, {worst['case']})"
        )
    if refused:
        said += f"; {len(refused)} refused"
    if problems:
        said += f"; {problems[0]}"
    figures = {"cases": ran, "refused": refused, "problems": problems, "worst": worst}
    return Row(what, backend.name, said, "wrong" if problems else "right", ours, figures=figures)
