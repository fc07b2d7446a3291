"""Is a backend right on a recorded call? Graded as on the numerics grid, with as many tokens and with one less."""

from collections.abc import Sequence
from typing import Any

from drivetrain.engine.ops.numerics import Measured, grade
from drivetrain.engine.ops.operator import Operator
from drivetrain.engine.ops.signature import Signature
from drivetrain.engine.ops_tuning.calling import arguments_on, forward_and_backward, peak_bytes
from drivetrain.engine.ops_tuning.inputs import case_of, main_dtype, with_tokens

__all__ = ["grade_call"]


def grade_call(
    operator: Operator, backend_name: str, signature: Signature, tokens: Sequence[int]
) -> dict[str, Any]:
    """Grade a backend, and measure what memory it needs where it is right.

    Args:
        tokens: numbers of tokens with which it is graded; empty: as it was recorded.

    Returns:
        ``{"problems", "measured", "peak_bytes"}``; ``measured`` has the worst of all grades for each output and
        gradient: ``{"what", "error", "allowed"}``.
    """
    backend = operator.backend(backend_name)
    assert backend is not None, f"{operator.name} has no backend {backend_name}"
    problems: list[str] = []
    worst: dict[str, Measured] = {}
    counts: Sequence[int | None] = tokens or (None,)
    for count in counts:
        call = signature if count is None else with_tokens(signature, count)
        found = grade(operator, backend, case_of(call), main_dtype(signature), device=signature.device)
        place = "" if count is None else f" with {count} tokens"
        if found.refused is not None:
            # Another number of tokens may be none that it serves: a call with it falls to another then, and says so.
            problems += [f"it refuses the call: {found.refused}"] if call == signature else []
            continue
        problems += [f"{problem}{place}" for problem in found.problems]
        for one in found.measured:
            known = worst.get(one.what)
            if known is None or _share(one) > _share(known):
                worst[one.what] = one
    peak = None
    if not problems:
        given = arguments_on(signature, seed=0)
        peak = peak_bytes(forward_and_backward(operator, backend_name, given), signature.device)
    return {
        "problems": problems,
        "measured": [
            {"what": one.what, "error": one.error, "allowed": one.allowed} for one in worst.values()
        ],
        "peak_bytes": peak,
    }


def _share(one: Measured) -> float:
    return one.error / one.allowed if one.allowed > 0 else 0.0
