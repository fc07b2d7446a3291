"""Bytes that operators on activations must move, by their shapes."""

import pytest

from drivetrain.trace.operator_shapes import Tensor
from drivetrain.trace.traffic import _moved, least_bytes

ROWS = 64


def wide(*dims: int) -> Tensor:
    return Tensor(dims, "fp32", 4)


@pytest.mark.parametrize(
    ("operator", "tensors", "count"),
    [
        ("aten::mul", (wide(64, 8), wide(64, 8)), 3 * 64 * 8 * 4),
        ("aten::mul", (wide(64, 8), wide(8)), (2 * 64 * 8 + 8) * 4),
        ("aten::silu", (wide(64, 8),), 2 * 64 * 8 * 4),
        ("aten::add_", (wide(64, 8), wide(64, 8)), 3 * 64 * 8 * 4),
        ("aten::sum", (wide(64, 8),), 64 * 8 * 4),
        ("aten::copy_", (Tensor((64, 8), "bf16", 2), wide(64, 8)), 64 * 8 * (2 + 4)),
        ("aten::view", (wide(64, 8),), 0),
        ("aten::mul", (), None),
        ("aten::mul", (wide(64, 8), wide(64, 3)), None),
    ],
)
def test_operands_are_read_once_and_results_written(
    operator: str, tensors: tuple[Tensor, ...], count: int | None
) -> None:
    assert least_bytes(operator, tensors) == count


def arguments(*dims: object, kind: str = "float") -> dict[str, object]:
    return {"Input Dims": list(dims), "Input type": [kind] * len(dims)}


def test_activations_are_told_by_the_rows_of_a_micro_batch() -> None:
    assert _moved("aten::mul", arguments([64, 8], [64, 8]), ROWS) == (True, 3 * 64 * 8 * 4)
    assert _moved("aten::mul", arguments([4, 16, 8], [4, 16, 8]), ROWS) == (True, 3 * 64 * 8 * 4)
    assert _moved("aten::mul", arguments([128, 8], [128, 8]), ROWS) == (False, None), "a matrix of weights"
    assert _moved("aten::mul", {}, ROWS) == (False, None), "shapes were not recorded"


def test_what_is_joined_is_read_and_written() -> None:
    joined = {"Input Dims": [[[64, 2, 4], [64, 2, 4]], []], "Input type": ["TensorList", "Scalar"]}
    assert _moved("aten::cat", joined, ROWS) == (True, 2 * 2 * 64 * 8 * 4)
    assert _moved("aten::_foreach_add_", joined, ROWS) == (True, None)
