"""What one trace says of how its work was done, as far as rules of diagnosis ask for it."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from drivetrain.measure.intervals import total, union
from drivetrain.measure.optimisation import Count
from drivetrain.trace.classify import Classification
from drivetrain.trace.enclosing import Enclosing
from drivetrain.trace.host_context import thread_keys, used_names
from drivetrain.trace.kernels import MatrixProducts, SmallOperator, matrix_products, small_operators
from drivetrain.trace.launch_bound import launch_bound_stretches
from drivetrain.trace.observe import observe, observed_rows
from drivetrain.trace.operator_shapes import product_of, tensors_of
from drivetrain.trace.steps import StepMark, Steps, find_steps
from drivetrain.trace.synchronisation import is_users_frame
from drivetrain.trace.table import Category, Trace

__all__ = ["Calls", "StepShapes", "TraceFigures", "trace_figures"]

_LOGS = re.compile(
    r"<built-in function print>|logging/__init__\.py\(|(^|/)(wandb|tensorboard|tensorboardX|mlflow|loguru|tqdm|rich)/"
)
"""Python frames that log or print, as the profiler names them."""
_AROUND_OTHERS = re.compile(r": (__iter__|__next__|__call__|track|wrap\w*|\w+_wrapper)$")
"""Frames of the same libraries that others run in: loops with a bar of progress, decorated functions. What these log
inside has frames of its own."""
_ALLOCATES = re.compile(
    r"(cuda|hip|musa)(Malloc|Free|MemCreate|MemMap|MemUnmap|MemRelease|MemSetAccess)$|cu(MemCreate|MemMap|MemUnmap|MemRelease|MemSetAccess)$"
)
"""Calls that a caching allocator makes of the runtime or driver when nothing that it holds fits."""
_OF_WEIGHTS = re.compile(r"aten::(mm|addmm|linear)$")
"""Products whose rows are the tokens of a batch, whatever its documents."""
_MOST_STEPS = 32
_MOST_PRODUCTS = 256
"""Of a step whose shapes are looked at: the first in time."""
_ALL = 1 << 31


@dataclass(frozen=True)
class Calls:
    """Records of one kind within the steps."""

    ns_per_step: float = 0.0
    """Length of their union, over the steps."""
    per_step: float = 0.0
    """How many, those inside others not counted."""
    names: tuple[str, ...] = ()
    """The most frequent first, four at most."""
    place: str | None = None
    """The innermost Python frame of the user's around the longest one; None where none was recorded."""


@dataclass(frozen=True)
class StepShapes:
    """Shapes of products with weights, step by step.

    Attributes:
        steps: numbers of the steps that were looked at; the first recorded one is not.
        odd: of those, the ones whose shapes differ from the most frequent ones.
        less: whether each odd step multiplies less than the usual ones.
        example: a shape of an odd step, and the usual ones' in its place, in words.
    """

    steps: tuple[int, ...]
    odd: tuple[int, ...]
    less: bool
    example: str


@dataclass(frozen=True)
class TraceFigures:
    """Figures of one rank's trace.

    Attributes:
        source: whose it is, in words.
        num_steps: steps in the trace; 0: none.
        has_device, has_python: whether it has records of a device, and of Python functions.
        products, small: as :mod:`drivetrain.trace.kernels` finds them, over the whole trace.
        matmul_dtypes: dtype → matrix products of the steps.
        launches: stretches in which the device waited for the host, with the operators waited for.
        logging: Python frames that log or print, on threads that also call operators.
        allocating: calls by which an allocator asks the device for memory, the first step left out.
        shapes: of the steps; None where fewer than three have shapes, or the device alone tells the steps.
    """

    source: str = "trace"
    num_steps: int = 0
    has_device: bool = False
    has_python: bool = False
    products: MatrixProducts = field(default_factory=lambda: MatrixProducts((), 0, 0))
    small: tuple[SmallOperator, ...] = ()
    matmul_dtypes: Mapping[str, Count] = field(default_factory=dict)
    launches: Calls = field(default_factory=Calls)
    logging: Calls = field(default_factory=Calls)
    allocating: Calls = field(default_factory=Calls)
    shapes: StepShapes | None = None

    @property
    def has_shapes(self) -> bool:
        """Whether operators' shapes were recorded."""
        return bool(self.products.shapes or self.small)


def trace_figures(trace: Trace, classes: Classification) -> TraceFigures:
    """Read them; arguments are read from the file.

    Raises:
        DataError: the file has gone.
    """
    events = trace.events
    steps = find_steps(events)
    rows = observed_rows(events, steps)
    python = rows[events.category[rows] == Category.PYTHON]
    number = max(1, len(steps.marks))
    return TraceFigures(
        source="trace" if trace.rank is None else f"trace of rank {trace.rank}",
        num_steps=len(steps.marks),
        has_device=not classes.host_view,
        has_python=len(python) > 0,
        products=matrix_products(trace, classes),
        small=() if classes.host_view else small_operators(trace, classes),
        matmul_dtypes=observe(trace, classes, steps).matmul_dtypes,
        launches=Calls() if classes.host_view else _launches(trace, steps),
        logging=_calls(trace, _logging(trace, python, rows, steps), number, with_place=True),
        allocating=_allocating(trace, rows, steps),
        shapes=_shapes(trace, steps),
    )


def _named(trace: Trace, rows: NDArray[np.int64], wanted: Callable[[str], bool]) -> NDArray[np.int64]:
    """Rows with a name for which ``wanted`` is true; each distinct name is asked once."""
    events = trace.events
    hit = np.zeros(len(events.names), np.bool_)
    for index in used_names(events, rows):
        hit[index] = wanted(events.names[index])
    return rows[hit[events.name[rows]]]


def _matches(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda name: pattern.search(name) is not None


def _logging(
    trace: Trace, python: NDArray[np.int64], rows: NDArray[np.int64], steps: Steps
) -> NDArray[np.int64]:
    """Frames that log on threads that call operators, too: one that only writes what others hand it stops nobody."""
    events = trace.events
    found = _named(
        trace, python, lambda name: _LOGS.search(name) is not None and _AROUND_OTHERS.search(name) is None
    )
    operators = rows[events.category[rows] == Category.CPU_OP]
    found = found[np.isin(thread_keys(events, found), np.unique(thread_keys(events, operators)))]
    if steps.marks:
        # What lasts for a step holds the step.
        shortest = min(mark.end_ns - mark.start_ns for mark in steps.marks)
        found = found[events.duration_ns[found] < shortest]
    return found


def _calls(trace: Trace, rows: NDArray[np.int64], steps: int, *, with_place: bool = False) -> Calls:
    if len(rows) == 0:
        return Calls()
    events = trace.events
    start, end = events.start_ns[rows], events.end_ns[rows]
    together = union(start, end)
    names = Counter(events.names[events.name[row]] for row in rows.tolist())
    place = None
    if with_place:
        longest = int(rows[np.argmax(events.duration_ns[rows])])
        python = np.flatnonzero(events.category == Category.PYTHON)
        logs = _matches(_LOGS)
        theirs = _named(trace, python, lambda name: is_users_frame(name) and not logs(name))
        key = int(thread_keys(events, np.array([longest]))[0])
        around = Enclosing(events, theirs).around(
            key, int(events.start_ns[longest]), int(events.end_ns[longest])
        )
        place = events.names[events.name[around[-1]]] if len(around) else None
    return Calls(
        ns_per_step=total(together) / steps,
        per_step=len(together) / steps,
        names=tuple(name for name, _ in names.most_common(4)),
        place=place,
    )


def _launches(trace: Trace, steps: Steps) -> Calls:
    stretches = launch_bound_stretches(trace, _ALL)
    if steps.marks:
        first, last = steps.marks[0].start_ns, steps.marks[-1].end_ns
        stretches = tuple(one for one in stretches if first <= one.start_ns < last)
    number = max(1, len(steps.marks))
    names: Counter[str] = Counter()
    for stretch in stretches:
        names.update(dict(stretch.operators))
    return Calls(
        ns_per_step=sum(stretch.waiting_ns for stretch in stretches) / number,
        per_step=len(stretches) / number,
        names=tuple(name for name, _ in names.most_common(4)),
    )


def _allocating(trace: Trace, rows: NDArray[np.int64], steps: Steps) -> Calls:
    """The first step left out: what it needs for the first time is allocated in every run."""
    if len(steps.marks) < 2:
        return Calls()
    events = trace.events
    runtime = rows[events.category[rows] == Category.RUNTIME]
    later = runtime[events.start_ns[runtime] >= steps.marks[0].end_ns]
    return _calls(trace, _named(trace, later, _matches(_ALLOCATES)), len(steps.marks) - 1)


def _shapes(trace: Trace, steps: Steps) -> StepShapes | None:
    marks = steps.marks[1:][:_MOST_STEPS]
    # A pattern of kernels gives the device's time: it does not tell which operators were called in a step.
    if len(marks) < 3 or steps.on_device:
        return None
    events = trace.events
    products = _named(trace, np.flatnonzero(events.category == Category.CPU_OP), _matches(_OF_WEIGHTS))
    found = [_products_of(trace, products, mark) for mark in marks]
    if not all(found):
        return None
    usual = Counter(found).most_common(1)[0][0]
    odd = [(mark.number, shapes) for mark, shapes in zip(marks, found, strict=True) if shapes != usual]
    work = sum(operations for *_, operations in usual)
    example = ""
    if odd:
        one = next((shape for shape in odd[0][1] if shape not in usual), odd[0][1][0])
        same = next((shape for shape in usual if shape[0] == one[0] and shape not in odd[0][1]), usual[0])
        example = f"{one[0]} of {one[1]} where others have {same[1]}"
    return StepShapes(
        steps=tuple(mark.number for mark in marks),
        odd=tuple(number for number, _ in odd),
        less=all(sum(operations for *_, operations in shapes) < work for _, shapes in odd),
        example=example,
    )


def _products_of(
    trace: Trace, products: NDArray[np.int64], mark: StepMark
) -> tuple[tuple[str, str, int], ...]:
    """Operator, shape in words, and operations of the first products of a step; each kind once."""
    events = trace.events
    start = events.start_ns[products]
    mine = products[(start >= mark.start_ns) & (start < mark.end_ns)][:_MOST_PRODUCTS]
    seen: dict[tuple[str, str, int], None] = {}
    for row, arguments in zip(mine.tolist(), trace.arguments(mine), strict=True):
        name = events.names[events.name[row]]
        product = product_of(name, tensors_of(arguments))
        if product is not None:
            seen[name, f"{product.m} x {product.n} x {product.k}", product.operations] = None
    return tuple(sorted(seen))
