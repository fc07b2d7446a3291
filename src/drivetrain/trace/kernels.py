"""Which kernels take the time, how well matrix products run for their shapes, and which small operators could go.

All of it is read from one trace. Arguments are read from the file once for each question, and only of the records
the question is about.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.classes import CLASS_INDEX, CLASSES
from drivetrain.trace.classify import Classification
from drivetrain.trace.host_context import host_places
from drivetrain.trace.operator_shapes import Product, Tensor, output_of, product_of, tensors_of
from drivetrain.trace.table import Category, EventTable, Trace

__all__ = [
    "KernelTotal",
    "MatrixProduct",
    "MatrixProducts",
    "SmallOperator",
    "matrix_products",
    "small_operators",
    "top_kernels",
]

MOST_OPERATORS = 20_000
"""Operators whose arguments are read for one question; of more, those with the longest kernels."""


@dataclass(frozen=True)
class KernelTotal:
    """All kernels of one name and class."""

    name: str
    kind: str
    """Class, of ``CLASSES``."""
    count: int
    total_ns: int
    """Sum of durations; kernels that overlap count each."""
    share: float
    """Of the summed duration of all kernels."""
    longest_ns: int
    blocks: int | None
    """Thread blocks of the longest one; None where not recorded."""
    multiprocessors: int | None
    """Of its device, where the file tells."""
    occupancy: float | None
    """Estimated achieved occupancy of the longest one, 0 to 1, as the profiler gives it."""

    @property
    def leaves_multiprocessors_idle(self) -> bool:
        """Whether the longest one has fewer blocks than its device has multiprocessors."""
        return (
            self.blocks is not None
            and self.multiprocessors is not None
            and self.blocks < self.multiprocessors
        )


def top_kernels(trace: Trace, classification: Classification, count: int = 20) -> tuple[KernelTotal, ...]:
    """The kernels with the most time, most first."""
    events = trace.events
    rows = np.flatnonzero(events.category == Category.KERNEL)
    if len(rows) == 0:
        return ()
    group = events.name[rows].astype(np.int64) * len(CLASSES) + classification.kind[rows]
    groups, place = np.unique(group, return_inverse=True)
    duration = events.duration_ns[rows]
    total = np.zeros(len(groups), np.int64)
    np.add.at(total, place, duration)
    best = np.argsort(-total, kind="stable")[:count]
    members = [rows[place == index] for index in best]
    longest = np.array([mine[np.argmax(events.duration_ns[mine])] for mine in members], np.int64)
    everything = int(duration.sum())
    return tuple(
        KernelTotal(
            name=events.names[events.name[row]],
            kind=CLASSES[classification.kind[row]],
            count=len(mine),
            total_ns=int(total[index]),
            share=int(total[index]) / everything if everything else 0.0,
            longest_ns=int(events.duration_ns[row]),
            blocks=_blocks(arguments),
            multiprocessors=_multiprocessors(trace.metadata, int(events.device[row])),
            occupancy=_occupancy(arguments),
        )
        for index, mine, row, arguments in zip(best, members, longest, trace.arguments(longest), strict=True)
    )


def _blocks(arguments: Mapping[str, Any]) -> int | None:
    grid = arguments.get("grid")
    if not isinstance(grid, list) or not grid or not all(isinstance(size, int) for size in grid):
        return None
    blocks = 1
    for size in grid:
        blocks *= size
    return blocks


def _occupancy(arguments: Mapping[str, Any]) -> float | None:
    value = arguments.get("est. achieved occupancy %")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # A kernel that ran occupied something: 0 is what the profiler writes when it does not know.
    return float(value) / 100 if value > 0 else None


def _multiprocessors(metadata: Mapping[str, Any], device: int) -> int | None:
    properties = metadata.get("deviceProperties")
    for entry in properties if isinstance(properties, list) else ():
        if isinstance(entry, Mapping) and entry.get("id") == device:
            count = entry.get("numSms")
            return count if isinstance(count, int) else None
    return None


# ---- matrix products --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatrixProduct:
    """All matrix products of one operator and shape."""

    operator: str
    product: Product
    count: int
    """Operators."""
    total_ns: int
    """Device time of all their kernels that multiply (a split-k reduction included)."""

    @property
    def flops_per_second(self) -> float | None:
        """Executed operations over device time; None without any."""
        return self.product.operations * self.count / (self.total_ns / 1e9) if self.total_ns else None

    @property
    def shape_notes(self) -> tuple[str, ...]:
        """What about the shape keeps tensor cores from running full. Empty: nothing found."""
        product, notes = self.product, []
        for name, size in (("m", product.m), ("n", product.n), ("k", product.k)):
            row_bytes = size * product.item_bytes
            if name != "m" and row_bytes % 16:
                multiple = 16 // product.item_bytes
                up = -(-size // multiple) * multiple
                notes.append(f"{name} = {size}: rows are not aligned to 16 bytes; {up} would be")
        short = min(product.m, product.n)
        if short < 64:
            notes.append(
                f"{'m' if short == product.m else 'n'} = {short}: a tile of the device is at least 64 wide"
            )
        if product.k < 64:
            notes.append(f"k = {product.k}: few products to each result written")
        return tuple(notes)


@dataclass(frozen=True)
class MatrixProducts:
    """Matrix products by shape, most device time first."""

    shapes: tuple[MatrixProduct, ...]
    covered_ns: int
    """Device time of the kernels in ``shapes``."""
    matmul_ns: int
    """Device time of all ``compute.matmul`` kernels; the rest lacks shapes, an operator, or is no plain product."""


def matrix_products(trace: Trace, classification: Classification) -> MatrixProducts:
    """Shapes, device time and achieved FLOP/s of matrix products, from the operators that launched them.

    Needs shapes in the file (``record_shapes=True``); without them nothing is covered.
    """
    events = trace.events
    rows = np.flatnonzero(classification.kind == CLASS_INDEX["compute.matmul"])
    if classification.host_view:
        operator, duration = rows, events.duration_ns[rows]
    else:
        operator, duration = host_places(events, rows).operator, events.duration_ns[rows]
    everything = int(duration.sum())
    known = operator >= 0
    operators, place = np.unique(operator[known], return_inverse=True)
    time_ns = np.zeros(len(operators), np.int64)
    np.add.at(time_ns, place, duration[known])
    chosen = np.sort(np.argsort(-time_ns, kind="stable")[:MOST_OPERATORS])
    totals: dict[tuple[str, Product], list[int]] = defaultdict(lambda: [0, 0])
    arguments = trace.arguments(operators[chosen]) if len(chosen) else []
    for index, values in zip(chosen, arguments, strict=True):
        name = events.names[events.name[operators[index]]]
        product = product_of(name, tensors_of(values))
        if product is not None:
            total = totals[name, product]
            total[0] += 1
            total[1] += int(time_ns[index])
    shapes = [MatrixProduct(name, product, count, ns) for (name, product), (count, ns) in totals.items()]
    shapes.sort(key=lambda shape: -shape.total_ns)
    return MatrixProducts(tuple(shapes), sum(shape.total_ns for shape in shapes), everything)


# ---- small operators between fusible neighbours -----------------------------------------------------------------


@dataclass(frozen=True)
class SmallOperator:
    """An operator run by a small kernel of its own between two others that a compiler could have merged it with."""

    before: str
    operator: str
    after: str
    """Names of the three operators, in the order their kernels ran on one stream."""
    count: int
    kernel_ns: int
    """Device time of the middle kernels."""
    saved_bytes: int
    """Memory traffic that merging all three would save: the middle one's input need not be written by the first and
    read by the second, nor its output written and read again. An estimate from shapes: the data flow itself is not in
    a trace, neighbours count as connected where the sizes of their tensors agree."""


_MEMORY_BOUND = tuple(
    CLASS_INDEX[f"compute.{name}"] for name in ("elementwise", "activation", "copy_cast", "norm", "loss")
)
_MULTIPLYING = (CLASS_INDEX["compute.matmul"], CLASS_INDEX["compute.attention"])


def small_operators(trace: Trace, classification: Classification) -> tuple[SmallOperator, ...]:
    """Small operators between two fusible neighbours, most bytes to save first.

    Neighbours are consecutive kernels of one stream, each launched by an operator of its own and memory-bound by its
    class. The middle one is small if it takes less time than the other two together.
    """
    events = trace.events
    triples = _memory_bound_triples(events, classification)
    if len(triples) == 0:
        return ()
    order = np.argsort(-events.duration_ns[triples[:, 1, 0]], kind="stable")[: MOST_OPERATORS // 3]
    triples = triples[np.sort(order)]
    operators = np.unique(triples[:, :, 1])
    arguments = dict(zip(operators.tolist(), trace.arguments(operators), strict=True))
    totals: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for triple in triples:
        names = [events.names[events.name[row]] for row in triple[:, 1]]
        tensors = [tensors_of(arguments[int(row)]) for row in triple[:, 1]]
        saved = _saved_bytes(names, tensors)
        if saved is not None:
            total = totals[names[0], names[1], names[2]]
            total[0] += 1
            total[1] += int(events.duration_ns[triple[1, 0]])
            total[2] += saved
    found = [SmallOperator(*names, *total) for names, total in totals.items()]
    return tuple(sorted(found, key=lambda small: -small.saved_bytes))


def _memory_bound_triples(events: EventTable, classification: Classification) -> NDArray[np.int64]:
    """Shape (t, 3, 2): for each triple its three (kernel row, operator row)."""
    rows = np.flatnonzero(events.is_device_work())
    stream = events.device[rows].astype(np.int64) * (len(events.streams) + 1) + events.stream[rows]
    order = np.argsort(stream, kind="stable")
    rows, stream = rows[order], stream[order]
    operator = host_places(events, rows).operator
    # A convolution's layout changes are copies by class, but not to be merged with what runs around it.
    multiplying = np.unique(operator[np.isin(classification.kind[rows], _MULTIPLYING)])
    bound = np.isin(classification.kind[rows], _MEMORY_BOUND)
    bound &= (operator >= 0) & ~np.isin(operator, multiplying)
    duration = events.duration_ns[rows]
    first = np.arange(max(0, len(rows) - 2))
    second, third = first + 1, first + 2
    good = bound[first] & bound[second] & bound[third]
    good &= (stream[first] == stream[second]) & (stream[second] == stream[third])
    good &= (operator[first] != operator[second]) & (operator[second] != operator[third])
    good &= duration[second] < duration[first] + duration[third]
    places = first[good][:, None] + np.arange(3)[None, :]
    return (
        np.stack((rows[places], operator[places]), axis=2) if len(places) else np.empty((0, 3, 2), np.int64)
    )


def _saved_bytes(names: list[str], tensors: list[tuple[Tensor | None, ...]]) -> int | None:
    """Bytes merging would save; None where the sizes do not connect the three."""
    before, result = output_of(names[0], tensors[0]), output_of(names[1], tensors[1])
    if before is None or result is None:
        return None
    skipped = 1 if names[1] == "aten::copy_" else 0
    taken = [
        tensor for tensor in tensors[1][skipped:] if tensor is not None and tensor.elements == before.elements
    ]
    used = [tensor for tensor in tensors[2] if tensor is not None and tensor.elements == result.elements]
    if not taken or not used or before.elements < 2:
        return None
    return 2 * taken[0].bytes + 2 * result.bytes
