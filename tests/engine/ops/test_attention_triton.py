"""Our Triton kernel in triton's interpreter: every kind of mask that it serves, forward and backward.

The interpreter shows that indices, masks and arithmetic are right; of a device it shows nothing.
"""

import json
from pathlib import Path

import pytest
from interpreter import run_interpreted

from drivetrain.engine.ops.attention import OPERATOR
from drivetrain.engine.ops.attention.cases import KINDS
from drivetrain.engine.ops.attention.docs import RULES

GRID = Path(__file__).with_name("interpreted_grid.py")
UNSERVED = {kind for kind, mask in KINDS.items() if RULES["triton"](mask, False) is not None}
CASES = [case.name for case in OPERATOR.cases() if case.name not in UNSERVED]


def _problems(calls: list[tuple[str, str, str]]) -> list[str]:
    found = run_interpreted(GRID, json.dumps([("attention", *call) for call in calls]), timeout_s=1700.0)
    assert len(found) == len(calls)
    problems = []
    for call, one in zip(calls, found, strict=True):
        assert one["refused"] is None, f"{call}: {one['refused']}"
        assert (
            one["measured"] == (2 if call[0] in ("one token", "window of one") else 4) or one["problems"]
        ), call
        problems += [f"{' '.join(call)}: {problem}" for problem in one["problems"]]
    return problems


QUICK = (
    ("causal", "float32", "dense"),
    ("prefix + documents", "float16", "dense"),
    ("window + documents", "bfloat16", "transposed"),
    ("alibi + documents", "float32", "expanded"),
    ("cross lengths, bottom right", "bfloat16", "dense"),
    ("cross lengths, top left", "float32", "dense"),
    ("documents without keys", "float32", "dense"),
    ("a tail of no document", "float16", "dense"),
    ("3 heads, 1 groups", "float32", "dense"),
    ("width 13", "float32", "dense"),
    ("features with gaps", "float32", "dense"),
    ("heads before tokens in memory", "bfloat16", "dense"),
    ("one token", "float32", "dense"),
    ("large scores", "bfloat16", "dense"),
)


def test_the_kernel_is_as_near_to_float64_as_the_dense_softmax() -> None:
    assert _problems(list(QUICK)) == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.exhaustive),
        pytest.param("float16", marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", marks=pytest.mark.long),
    ],
)
def test_the_kernel_passes_the_whole_grid(dtype: str) -> None:
    assert _problems([(case, dtype, "dense") for case in CASES]) == []


SCRIPT = Path(__file__).with_name("interpreted_attention.py")


@pytest.fixture(scope="module")
def checks() -> dict[str, bool]:
    """What the script found, by the name of the check."""
    found: dict[str, bool] = run_interpreted(SCRIPT)
    return found


def test_documents_are_equal_to_the_bit_whatever_is_in_the_others(checks: dict[str, bool]) -> None:
    assert checks["perturbed documents do not move others"]
    assert checks["not-a-number stays in its document"]


def test_offsets_beyond_two_to_the_31_are_right(checks: dict[str, bool]) -> None:
    """Liger-Kernel#1483: a product of 32-bit indices and strides wrapped."""
    assert checks["a stride of 2^27 elements over 20 tokens"]


def test_it_is_called_by_compiled_code_without_a_graph_break(checks: dict[str, bool]) -> None:
    assert checks["fullgraph"]


def test_it_keeps_the_rules_of_torchs_operators(checks: dict[str, bool]) -> None:
    assert checks["opcheck"]


def test_a_call_without_queries_launches_nothing(checks: dict[str, bool]) -> None:
    assert checks["no documents"]
