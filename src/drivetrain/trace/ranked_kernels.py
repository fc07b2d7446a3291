"""The kernels (without a device: the host's operators) with the most time, and how fast they ran where shapes tell.

FLOPs are those of matrix products whose shapes were recorded. Bytes are those of element-wise operators with one
kernel each: every operand read once and the result written once. Of everything else the rate is unknown, with the
reason. What a trace shows of fallbacks is marked beside the kernel that ran instead.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.classes import CLASS_INDEX, CLASSES
from drivetrain.trace.classify import Classification
from drivetrain.trace.host import HostRecords, compute_rows
from drivetrain.trace.host_context import host_places
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.observe import ATTENTION, attention_of_rows, dtype_of_kernel, observed_rows
from drivetrain.trace.operator_regions import REGION, region_of_rows
from drivetrain.trace.operator_shapes import output_of, product_of, tensors_of
from drivetrain.trace.steps import Steps, find_steps
from drivetrain.trace.table import Category, EventTable, Trace

__all__ = ["RankedKernel", "RankedKernels", "Work", "ranked_kernels"]

MOST_OPERATORS = 20_000
"""Operators whose arguments are read; of more, those with the longest kernels."""

_POINTWISE = re.compile(
    r"aten::(add|sub|rsub|mul|div|neg|abs|pow|exp|log|sqrt|rsqrt|sin|cos|clamp|tanh|sigmoid|silu|gelu|relu|addcmul"
    r"|addcdiv|copy|silu_backward|gelu_backward|tanh_backward|sigmoid_backward|threshold_backward)_?$"
)
"""Operators that read each operand once and write one result, element by element."""
_SMALL = frozenset(
    CLASS_INDEX[f"compute.{name}"] for name in ("elementwise", "activation", "norm", "copy_cast")
)
_MATMUL, _ATTENTION = CLASS_INDEX["compute.matmul"], CLASS_INDEX["compute.attention"]
_UPDATE = CLASS_INDEX["compute.optimizer"]
_MATH, _EAGER = ATTENTION.index("math"), ATTENTION.index("eager")
_DTYPES = ("bf16", "fp16", "fp8", "tf32")


@dataclass(frozen=True)
class Work:
    """What the recorded shapes say that some calls did."""

    amount: int
    """FLOPs, or bytes."""
    unit: str
    """``FLOP`` or ``B``."""
    time_ns: int
    """Time of those calls."""
    dtype: str | None = None
    """Of the factors of all those products; None: bytes, unknown, or several."""

    @property
    def per_second(self) -> float:
        """FLOP/s, or bytes per second."""
        return self.amount / self.time_ns * 1e9


@dataclass(frozen=True)
class RankedKernel:
    """All calls of one name and class within the steps."""

    name: str
    kind: str
    """Class of ``CLASSES``."""
    calls: int
    total_ns: int
    """Sum of durations; calls that overlap count each."""
    share: float
    """Of the summed durations of all kernels, or operators."""
    work: Work | None
    unknown: str | None
    """Why `work` is None; None where it is known."""
    fallback: str | None
    """What it stands in for, and what for; None: nothing shows that it does."""


@dataclass(frozen=True)
class RankedKernels:
    """The kernels of one trace, most time first.

    Attributes:
        kernels: the first ones.
        names: how many names there are in all.
        total_ns: summed durations of all of them.
        num_steps: steps that they are of; 0: of the whole trace.
        on_device: whether they are kernels; else operators of the host.
    """

    kernels: tuple[RankedKernel, ...]
    names: int
    total_ns: int
    num_steps: int
    on_device: bool


def ranked_kernels(
    trace: Trace,
    classes: Classification,
    *,
    count: int = 10,
    rules: NameTable | None = None,
    absent: Collection[str] = (),
    served_otherwise: Mapping[str, str] | None = None,
) -> RankedKernels:
    """The kernels with the most time.

    Args:
        trace: one rank's.
        classes: its classification.
        count: how many.
        rules: name tables; the built-in ones where None.
        absent: words of :data:`drivetrain.trace.expectations.EXPECTATIONS` that the records were found not to show, or
            in part only.
        served_otherwise: operator and backend that stood in, as its region names them (``rms_norm/eager``) → what was
            asked for.

    Raises:
        DataError: the file has gone, and arguments must be read from it.
    """
    events = trace.events
    steps = find_steps(events)
    rows = _rows(trace, classes, steps, rules)
    if len(rows) == 0:
        return RankedKernels((), 0, 0, len(steps.marks), not classes.host_view)
    group = events.name[rows].astype(np.int64) * len(CLASSES) + classes.kind[rows]
    groups, place = np.unique(group, return_inverse=True)
    duration = events.duration_ns[rows]
    total = np.zeros(len(groups), np.int64)
    np.add.at(total, place, duration)
    best = np.argsort(-total, kind="stable")[:count]
    members = [rows[place == index] for index in best]
    works = _works(trace, classes, members)
    regions = region_of_rows(events, np.concatenate(members), host_view=classes.host_view)
    everything = int(duration.sum())
    found, first = [], 0
    for index, mine, (work, unknown) in zip(best, members, works, strict=True):
        kind = int(classes.kind[mine[0]])
        region = _region(events, regions[first : first + len(mine)], mine)
        first += len(mine)
        dtype = None if work is None else work.dtype
        found.append(
            RankedKernel(
                name=events.names[events.name[mine[0]]],
                kind=CLASSES[kind],
                calls=len(mine),
                total_ns=int(total[index]),
                share=int(total[index]) / everything if everything else 0.0,
                work=work,
                unknown=unknown,
                fallback=_operators_fallback(region, served_otherwise or {})
                or _fallback(events, classes, mine, kind, dtype, absent),
            )
        )
    return RankedKernels(tuple(found), len(groups), everything, len(steps.marks), not classes.host_view)


def _rows(trace: Trace, classes: Classification, steps: Steps, rules: NameTable | None) -> NDArray[np.int64]:
    events = trace.events
    if classes.host_view:
        rows = compute_rows(HostRecords(events, classes, NameTable.load() if rules is None else rules))
    else:
        rows = np.flatnonzero(events.category == Category.KERNEL)
    return np.intersect1d(rows, observed_rows(events, steps), assume_unique=True)


# ---- what shapes tell -------------------------------------------------------------------------------------------


def _works(
    trace: Trace, classes: Classification, members: Sequence[NDArray[np.int64]]
) -> list[tuple[Work | None, str | None]]:
    """Work of each group of rows, or why it is unknown. Arguments are read once for all of them."""
    events = trace.events
    rows = np.concatenate(members)
    if classes.host_view:
        operator, kernels_of = rows, Counter(rows.tolist())
    else:
        # An operator may have kernels that are not among the first ones: all are looked at.
        kernels = np.flatnonzero(events.category == Category.KERNEL)
        launched_by = host_places(events, kernels).operator
        operator = launched_by[np.searchsorted(kernels, rows)]
        kernels_of = Counter(launched_by[launched_by >= 0].tolist())
    known, inverse = np.unique(operator[operator >= 0], return_inverse=True)
    time_ns = np.zeros(len(known), np.int64)
    np.add.at(time_ns, inverse, events.duration_ns[rows[operator >= 0]])
    asked = np.sort(known[np.argsort(-time_ns, kind="stable")[:MOST_OPERATORS]])
    arguments = dict(zip(asked.tolist(), trace.arguments(asked), strict=True)) if len(asked) else {}
    found, first = [], 0
    for mine in members:
        operators = operator[first : first + len(mine)]
        first += len(mine)
        found.append(_work_of(events, classes, mine, operators, arguments, kernels_of))
    return found


def _work_of(
    events: EventTable,
    classes: Classification,
    rows: NDArray[np.int64],
    operators: NDArray[np.int64],
    arguments: Mapping[int, Mapping[str, object]],
    kernels_of: Mapping[int, int],
) -> tuple[Work | None, str | None]:
    multiplies = int(classes.kind[rows[0]]) == _MATMUL
    amount = time_ns = 0
    dtypes: set[str] = set()
    has_shapes = False
    for row, operator in zip(rows.tolist(), operators.tolist(), strict=True):
        if operator not in arguments:
            continue
        name, tensors = events.names[events.name[operator]], tensors_of(arguments[operator])
        has_shapes |= bool(tensors)
        if multiplies:
            product = product_of(name, tensors)
            # Of an operator with several kernels nothing tells which part of its work each did.
            if product is not None and kernels_of[operator] == 1:
                amount += product.operations
                time_ns += int(events.duration_ns[row])
                dtypes.add(dtype_of_kernel(events.names[events.name[row]]) or product.dtype)
        elif _POINTWISE.match(name) and kernels_of[operator] == 1:
            result = output_of(name, tensors)
            if result is not None:
                read = sum(tensor.bytes for tensor in tensors if tensor is not None)
                amount += read if name == "aten::copy_" else read + result.bytes
                time_ns += int(events.duration_ns[row])
    if amount and time_ns:
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
        return Work(amount, "FLOP" if multiplies else "B", time_ns, dtype), None
    if not has_shapes:
        return None, "no shapes were recorded for it"
    return None, "its FLOPs and bytes are not counted"


# ---- fallbacks --------------------------------------------------------------------------------------------------


def _region(events: EventTable, regions: NDArray[np.int64], rows: NDArray[np.int64]) -> str | None:
    """``operator/backend`` of the region that holds most of the time of some rows; None: most of it is in none."""
    time: Counter[int] = Counter()
    for region, ns in zip(regions.tolist(), events.duration_ns[rows].tolist(), strict=True):
        time[region] += ns
    most = time.most_common(1)[0][0]
    match = None if most < 0 else REGION.match(events.names[most])
    return None if match is None else f"{match['operator']}/{match['backend']}"


def _operators_fallback(region: str | None, served: Mapping[str, str]) -> str | None:
    if region is None or region not in served:
        return None
    return f"{region.partition('/')[2]} in place of {served[region]}"


def _fallback(
    events: EventTable,
    classes: Classification,
    rows: NDArray[np.int64],
    kind: int,
    dtype: str | None,
    absent: Collection[str],
) -> str | None:
    if kind == _ATTENTION:
        time = np.zeros(len(ATTENTION), np.int64)
        np.add.at(time, attention_of_rows(events, classes, rows), events.duration_ns[rows])
        most = int(np.argmax(time))
        if most == _MATH:
            return "PyTorch's plain attention in place of a fused one"
        return "plain attention in place of flash" if most == _EAGER and "flash" in absent else None
    if kind == _MATMUL:
        missed = [word for word in _DTYPES if word in absent and dtype not in (None, word)]
        return f"{dtype} in place of {missed[0]}" if missed else None
    if kind == _UPDATE and "fused-optimizer" in absent:
        return "an update by single operators in place of a fused one"
    if kind in _SMALL and "compile" in absent:
        return "an operator of its own in place of compiled code"
    return None
