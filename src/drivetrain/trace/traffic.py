"""Bytes that operators on activations read and write, by the shapes of their operands.

Activations are told from parameters, gradients and figures by their rows: one for each token of a micro-batch. What is
counted is the least an operator can move: each operand read once, the result written once; views move nothing. Copies
that caches save, and memory that is fetched before it is written, are not counted.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from drivetrain.trace.classes import CLASS_INDEX, CLASSES
from drivetrain.trace.classify import Classification
from drivetrain.trace.host_context import host_places
from drivetrain.trace.observe import observed_rows
from drivetrain.trace.operator_shapes import Tensor, output_of, tensors_of
from drivetrain.trace.steps import find_steps
from drivetrain.trace.table import Trace

__all__ = ["OperatorTraffic", "activation_traffic", "least_bytes"]

KINDS = ("compute.norm", "compute.activation", "compute.elementwise", "compute.copy_cast")
"""Memory-bound classes of the account whose work lies between products."""
MOST_OPERATORS = 20_000
"""Whose arguments are read: of more, those with the longest work."""
_READ_ALONE = frozenset({"aten::sum", "aten::mean", "aten::amax", "aten::linalg_vector_norm"})
"""What they write is a row or a figure."""
_VIEWS = frozenset(
    {
        "aten::alias", "aten::as_strided", "aten::chunk", "aten::detach", "aten::expand", "aten::narrow",
        "aten::permute", "aten::reshape", "aten::select", "aten::slice", "aten::split", "aten::squeeze", "aten::t",
        "aten::transpose", "aten::unflatten", "aten::unsqueeze", "aten::view", "aten::_unsafe_view",
    }
)  # fmt: skip


@dataclass(frozen=True)
class OperatorTraffic:
    """All calls of one operator on activations, in all steps together."""

    kind: str
    """Class of the account."""
    operator: str
    calls: int
    ns: int
    """Summed durations of the work."""
    bytes: int | None
    """None where the shapes of some call do not tell."""


def activation_traffic(
    trace: Trace, classes: Classification, *, rows_of_micro_batch: int
) -> tuple[tuple[OperatorTraffic, ...], int]:
    """Memory-bound operators that have an operand with ``rows_of_micro_batch`` rows, and the number of steps they are
    of (1 where the trace has none). Empty where shapes were not recorded.

    Args:
        rows_of_micro_batch: tokens of a micro-batch on this rank.

    Raises:
        DataError: the file has gone, and arguments must be read from it.
    """
    events = trace.events
    steps = find_steps(events)
    rows = observed_rows(events, steps)
    wanted = np.array([CLASS_INDEX[name] for name in KINDS])
    rows = rows[np.isin(classes.kind[rows], wanted)]
    operator = rows if classes.host_view else host_places(events, rows).operator
    rows, operator = rows[operator >= 0], operator[operator >= 0]
    if len(rows) > MOST_OPERATORS:
        longest = np.sort(np.argsort(-events.duration_ns[rows], kind="stable")[:MOST_OPERATORS])
        rows, operator = rows[longest], operator[longest]
    asked, place = np.unique(operator, return_inverse=True)
    shapes = trace.arguments(asked) if len(asked) else []
    moved = [
        _moved(events.names[events.name[row]], arguments, rows_of_micro_batch)
        for row, arguments in zip(asked.tolist(), shapes, strict=True)
    ]
    found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    unknown: set[tuple[str, str]] = set()
    counted: set[int] = set()
    for row, index in zip(rows.tolist(), place.tolist(), strict=True):
        is_activation, count = moved[index]
        if not is_activation:
            continue
        key = (CLASSES[classes.kind[row]], events.names[events.name[asked[index]]])
        total = found[key]
        total[1] += int(events.duration_ns[row])
        if index in counted:  # A second kernel of one operator.
            continue
        counted.add(index)
        total[0] += 1
        if count is None:
            unknown.add(key)
        else:
            total[2] += count
    traffic = tuple(
        OperatorTraffic(kind, name, calls, ns, None if (kind, name) in unknown else count)
        for (kind, name), (calls, ns, count) in sorted(found.items(), key=lambda item: -item[1][1])
    )
    return traffic, max(1, len(steps.marks))


def _moved(name: str, arguments: Mapping[str, Any], rows: int) -> tuple[bool, int | None]:
    """Whether an operator works on activations, and the bytes it must move."""
    tensors = tensors_of(arguments)
    lists = _listed(arguments)
    every = [one for one in (*tensors, *lists) if one is not None]
    if not any(_has_rows(one, rows) for one in every):
        return False, None
    if lists:
        # What is joined is read and written.
        return True, 2 * sum(one.bytes for one in lists) if name in ("aten::cat", "aten::stack") else None
    return True, least_bytes(name, tensors)


def _has_rows(tensor: Tensor, rows: int) -> bool:
    """Whether the first one or two dimensions (sequences, tokens) are the tokens of a micro-batch."""
    dims = tensor.dims
    return (bool(dims) and dims[0] == rows) or (len(dims) > 2 and dims[0] * dims[1] == rows)


def _listed(arguments: Mapping[str, Any]) -> list[Tensor]:
    """Tensors of the first argument, where that is a list of them whose sizes were recorded; of 4 bytes an element
    where their type was not."""
    dims = arguments.get("Input Dims", arguments.get("Input dims"))
    if not isinstance(dims, list) or not dims or not isinstance(dims[0], list):
        return []
    if not dims[0] or not all(
        isinstance(one, list) and all(isinstance(size, int) for size in one) for one in dims[0]
    ):
        return []
    return [Tensor(tuple(one), "unknown", 4) for one in dims[0]]


def least_bytes(operator: str, tensors: tuple[Tensor | None, ...]) -> int | None:
    """Bytes that an operator must read and write; None where its operands' shapes do not tell.

    Args:
        operator: ``aten::mul``; one that ends in an underscore writes into its first argument.
        tensors: its tensor arguments by position.
    """
    if operator in _VIEWS:
        return 0
    present = [one for one in tensors if one is not None]
    if not present:
        return None
    if operator == "aten::copy_":
        return sum(one.bytes for one in present[:2])
    read = sum(one.bytes for one in present)
    if operator in _READ_ALONE:
        return read
    if operator.endswith("_"):
        return read + present[0].bytes
    written = output_of(operator, tensors)
    return None if written is None else read + written.bytes
