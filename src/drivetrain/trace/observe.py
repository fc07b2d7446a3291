"""What a trace shows of *how* the work was done: which operators and kernels, in which dtype, by which attention.

The catalogue's entries read their evidence from it, and fallbacks are found by it. Everything but dtypes comes from
the columns; dtypes of operators need their recorded arguments, which are read from the file again.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.measure.optimisation import Count, HostMemory, Observation
from drivetrain.trace.classes import CLASS_INDEX, COLLECTIVE_KINDS
from drivetrain.trace.classify import Classification
from drivetrain.trace.host_context import HostPlaces, Ranges, host_places, own_places, used_names
from drivetrain.trace.operator_shapes import factor_of, tensors_of
from drivetrain.trace.steps import UNKNOWN_TIME, Steps, find_steps, launch_times
from drivetrain.trace.table import Category, EventTable, Trace

__all__ = ["attention_of_rows", "dtype_of_kernel", "observe", "observed_rows"]

MOST_OPERATORS = 4_000
"""Matrix products whose arguments are read: of more, the first in time, and the counts are of those."""

_KERNEL_DTYPES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (dtype, re.compile(pattern, re.IGNORECASE))
    for dtype, pattern in (
        # Four-bit factors have no key of their own, and their scales' or results' types must not speak for them.
        ("unknown", r"e2m1|mxfp4|nvfp4|_f4f4"),
        ("fp8", r"e4m3|e5m2|float8|fp8|nvjet_(sm\d+_)?qq|^Cijk_\w+?_[FB]8"),
        ("bf16", r"bf16|bfloat16|nvjet_(sm\d+_)?ts|^Cijk_[A-Z]\w+?_B[BS]S_"),
        ("tf32", r"tf32|_s1688(gemm|dgrad|wgrad|fprop)_(?!f?p?16)(?!\w*f16)"),
        (
            "fp16",
            r"(?<!b)f(p|loat)?16|half|hgemm|_h(884|1688|16816)|nvjet_(sm\d+_)?hs"
            r"|^Cijk_[A-Z]\w+?_H(HS|SS|HH|BH|B)_",
        ),
        ("int8", r"int8|i8i8|_i?s8_|\bimma\b|_imma_|^Cijk_[A-Z]\w+?_(4x)?I8"),
        ("fp64", r"dgemm|double|f64|fp64|_d884|^Cijk_[A-Z]\w+?_DB_"),
        ("fp32", r"sgemm|simt|f32f32|fp32|\bfloat\b|^Cijk_[A-Z]\w+?_S_?B_"),
    )
)
"""Dtype of a matrix product's factors → kernel names of it (cuBLAS, CUTLASS, hipBLASLt); the first wins."""

_WORD_DTYPES = {"signed char": "int8", "unsigned char": "int8"}
_OBSERVED_DTYPES = frozenset({"bf16", "fp16", "fp32", "fp64", "fp8", "int8"})

ATTENTION = ("flash", "efficient", "cudnn", "flex", "math", "eager", "unknown")
"""Implementations of attention, the keys of ``Observation.attention``."""

_ATTENTION_NAMES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("cudnn", r"cudnn\w*(attention|sdpa|mha|flash)|Cudnn\w*Attention"),
        ("flex", r"flex_?(decod|atten)"),
        # fmha_cutlass is PyTorch's memory-efficient kernel, not flash.
        ("efficient", r"efficient_attention|EfficientAttention|fmha_cutlass[FB]|Attention(Backward)?Kernel<"),
        ("math", r"_scaled_dot_product_attention_math"),
        (
            "flash",
            r"[fF]lash_?[aA]tt|[fF]lash_(fwd|bwd)|[fF]lash(Infer|MLA)|[fF]mha|\bmha_(fwd|bwd|varlen)|^_?attn_(fwd|bwd)"
            r"|^_?bwd_(kernel|preprocess)|Batch(Prefill|Decode)|unified_attention|paged_attention",
        ),
    )
)
_SOFTMAX = re.compile(r"soft_?max", re.IGNORECASE)


def dtype_of_kernel(name: str) -> str | None:
    """Dtype of the factors of a matrix-product kernel; None where its name does not tell."""
    if name.startswith("_Z"):  # Mangled: a type is one letter there, and substitutions look like types.
        return "bf16" if "bfloat16" in name else "fp16" if "6__half" in name else None
    return next((dtype for dtype, pattern in _KERNEL_DTYPES if pattern.search(name)), None)


def observe(trace: Trace, classes: Classification, steps: Steps | None = None) -> Observation:
    """What the records of a trace's steps show; of the whole trace where it has no steps.

    Args:
        trace: one rank's.
        classes: its classification.
        steps: its steps; found here where None. All of them count, the first recorded one too.

    Raises:
        DataError: the file has gone, and arguments must be read from it.
    """
    events = trace.events
    steps = find_steps(events) if steps is None else steps
    rows = observed_rows(events, steps)
    category = events.category[rows]
    operators = _counts(events, rows[category == Category.CPU_OP])
    kernels = _counts(events, rows[category == Category.KERNEL])
    ranges = _counts(events, rows[category == Category.ANNOTATION])
    dtypes, has_shapes = _matmul_dtypes(trace, classes, rows)
    missing = {
        "operators": not operators,
        "kernels": not kernels,
        # Step marks are made by the profiler itself: alone they do not show that ranges were recorded.
        "ranges": all(name.startswith("ProfilerStep") for name in ranges),
        "shapes": not has_shapes,
        "collectives": not kernels and not ranges,
    }
    return Observation(
        num_steps=len(steps.marks),
        operators=operators,
        kernels=kernels,
        ranges=ranges,
        matmul_dtypes=dtypes,
        attention=_attention(events, classes, rows),
        collective_bytes=_collective_bytes(events, classes, rows),
        missing=frozenset(name for name, is_missing in missing.items() if is_missing),
        host_memory=_host_memory(trace.metadata),
    )


def _host_memory(metadata: Mapping[str, Any]) -> HostMemory | None:
    """What a run of ours wrote beside its records; anybody may have written something else there."""
    about = metadata.get("drivetrain")
    found = about.get("host_memory") if isinstance(about, dict) else None
    if not isinstance(found, dict):
        return None
    keeps, reason, faults = (found.get(key) for key in ("keeps_freed", "reason", "page_faults_per_step"))
    counted = isinstance(faults, int | float) and not isinstance(faults, bool)
    return HostMemory(
        keeps_freed=keeps if isinstance(keeps, bool) else None,
        reason=reason if isinstance(reason, str) else None,
        page_faults_per_step=float(faults) if faults is not None and counted else None,
    )


def observed_rows(events: EventTable, steps: Steps) -> NDArray[np.int64]:
    """Rows of the records that belong to the steps: host records that start in them, device records launched in them.

    Device records without a known launch count by their own start. Everything where there are no steps.
    """
    if not steps.marks:
        return np.arange(len(events))
    first = min(mark.start_ns for mark in steps.marks)
    last = max(mark.end_ns for mark in steps.marks)
    times = events.start_ns
    device = np.flatnonzero(events.is_device_work())
    if len(device) and not steps.on_device:
        launched = launch_times(events, device)
        times = times.copy()
        times[device] = np.where(launched == UNKNOWN_TIME, times[device], launched)
    return np.flatnonzero((times >= first) & (times < last))


def _counts(events: EventTable, rows: NDArray[np.int64]) -> dict[str, Count]:
    """Name → calls and summed durations."""
    name = events.name[rows]
    calls = np.bincount(name, minlength=len(events.names))
    total = np.zeros(len(events.names), np.int64)
    np.add.at(total, name, events.duration_ns[rows])
    return {events.names[i]: Count(int(calls[i]), int(total[i])) for i in np.flatnonzero(calls)}


def _summed(keys: Sequence[str], which: NDArray[np.int64], duration: NDArray[np.int64]) -> dict[str, Count]:
    """Key → calls and summed durations of the rows whose key it is."""
    calls = np.bincount(which, minlength=len(keys))
    total = np.zeros(len(keys), np.int64)
    np.add.at(total, which, duration)
    return {key: Count(int(calls[i]), int(total[i])) for i, key in enumerate(keys) if calls[i]}


# ---- dtypes -----------------------------------------------------------------------------------------------------


def _matmul_dtypes(
    trace: Trace, classes: Classification, rows: NDArray[np.int64]
) -> tuple[dict[str, Count], bool]:
    """Dtype → matrix products, and whether shapes were recorded at all.

    A kernel's name decides, since only it tells TF32 from fp32; where it does not tell, its operator's first factor.
    """
    events = trace.events
    rows = rows[classes.kind[rows] == CLASS_INDEX["compute.matmul"]]
    if classes.host_view:
        operator, told = rows, np.full(len(rows), -1)
    else:
        operator = host_places(events, rows).operator
        told = _told_by_name(events, rows)
    asked = np.unique(operator[(told < 0) & (operator >= 0)])
    capped = len(asked) > MOST_OPERATORS
    asked = asked[:MOST_OPERATORS]
    words, has_shapes = _factor_dtypes(trace, asked)
    if not has_shapes and len(asked) == 0:
        has_shapes = _any_shapes(trace)
    place = np.searchsorted(asked, operator)
    found = (place < len(asked)) & (operator >= 0)
    found[found] = asked[place[found]] == operator[found]
    by_operator = np.full(len(rows), _UNKNOWN, np.int64)
    by_operator[found] = words[place[found]]
    which = np.where(told >= 0, told, by_operator)
    if capped:
        kept = (told >= 0) | found
        rows, which = rows[kept], which[kept]
    return _summed(_DTYPES, which, events.duration_ns[rows]), has_shapes


_DTYPES: tuple[str, ...] = ("bf16", "fp16", "fp32", "fp64", "fp8", "tf32", "int8", "unknown")
_UNKNOWN = _DTYPES.index("unknown")


def _told_by_name(events: EventTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index into ``_DTYPES`` that each kernel's own name tells; -1: it does not."""
    told = np.full(len(events.names), -1, np.int64)
    for index in used_names(events, rows):
        dtype = dtype_of_kernel(events.names[index])
        if dtype is not None:
            told[index] = _DTYPES.index(dtype)
    return told[events.name[rows]]


def _factor_dtypes(trace: Trace, operators: NDArray[np.int64]) -> tuple[NDArray[np.int64], bool]:
    """Index into ``_DTYPES`` of the first factor of each operator, and whether any operator had shapes."""
    events = trace.events
    found = np.full(len(operators), _UNKNOWN, np.int64)
    has_shapes = False
    for position, arguments in enumerate(trace.arguments(operators)):
        tensors = tensors_of(arguments)
        has_shapes |= bool(tensors)
        factor = factor_of(events.names[events.name[operators[position]]], tensors)
        if factor is not None:
            word = _WORD_DTYPES.get(factor.dtype, factor.dtype)
            found[position] = _DTYPES.index(word) if word in _OBSERVED_DTYPES else _UNKNOWN
    return found, has_shapes


def _any_shapes(trace: Trace) -> bool:
    """Whether the first operators of the file have shapes."""
    operators = np.flatnonzero(trace.events.category == Category.CPU_OP)[:64]
    return any(tensors_of(arguments) for arguments in trace.arguments(operators))


# ---- attention --------------------------------------------------------------------------------------------------


def _attention(events: EventTable, classes: Classification, rows: NDArray[np.int64]) -> dict[str, Count]:
    rows = rows[classes.kind[rows] == CLASS_INDEX["compute.attention"]]
    which = attention_of_rows(events, classes, rows)
    return _summed(ATTENTION, which, events.duration_ns[rows])


def attention_of_rows(
    events: EventTable, classes: Classification, rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Index into ``ATTENTION`` of each of some ``compute.attention`` rows.

    The operator that launched a kernel decides (one Triton kernel may serve two implementations), then the kernel's
    name, then an implementation's operator around it. A softmax outside any is *eager*, attention written out of
    products; where the trace has PyTorch's math implementation it is that one's backward.
    """
    places = own_places(events, rows) if classes.host_view else host_places(events, rows)
    of_name = np.full(len(events.names), -1, np.int64)
    softmax = np.zeros(len(events.names), np.bool_)
    on_host = np.flatnonzero(events.category == Category.CPU_OP)
    for index in np.union1d(used_names(events, rows), used_names(events, on_host)):
        name = events.names[index]
        kind = next((kind for kind, pattern in _ATTENTION_NAMES if pattern.search(name)), None)
        of_name[index] = -1 if kind is None else ATTENTION.index(kind)
        softmax[index] = _SOFTMAX.search(name) is not None
    launched = places.operator >= 0
    which = np.where(launched, of_name[events.name[places.operator]], -1)
    which = np.where(which >= 0, which, of_name[events.name[rows]])
    around = on_host[of_name[events.name[on_host]] >= 0]
    which = _inside_implementation(events, places, which, around, of_name)
    is_softmax = softmax[events.name[rows]]
    is_softmax |= launched & softmax[events.name[places.operator]]
    math = ATTENTION.index("math")
    has_math = bool((of_name[events.name[around]] == math).any())
    which = np.where((which < 0) & is_softmax, math if has_math else ATTENTION.index("eager"), which)
    return np.where(which < 0, ATTENTION.index("unknown"), which)


def _inside_implementation(
    events: EventTable,
    places: HostPlaces,
    which: NDArray[np.int64],
    around: NDArray[np.int64],
    of_name: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Rows still undecided, by the implementation's operator they run in."""
    which = which.copy()
    for kind in np.unique(of_name[events.name[around]]):
        if (which >= 0).all():
            break
        ranges = Ranges.of(events, around[of_name[events.name[around]] == kind])
        which[ranges.contain(places.key, places.time_ns) & (which < 0)] = kind
    return which


# ---- communication ----------------------------------------------------------------------------------------------


def _collective_bytes(
    events: EventTable, classes: Classification, rows: NDArray[np.int64]
) -> Mapping[str, tuple[int, ...]]:
    rows = rows[classes.is_communication()[rows] & (events.bytes[rows] >= 0)]
    kind = classes.collective_kind[rows]
    return {
        COLLECTIVE_KINDS[index]: tuple(events.bytes[rows[kind == index]].tolist())
        for index in np.unique(kind).tolist()
    }
