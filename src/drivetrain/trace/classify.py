"""What each event of a trace is: a class of work, a kind of collective, a parallel group, repeated or not.

Names decide first (``names/<version>/*.toml``), each distinct name once. Then the host side of a launch narrows what
a name leaves open: a reduction launched by a layer norm is a norm, an addition inside ``Optimizer.step`` is the
optimizer. Last, kernels no rule knows on a stream that otherwise carries communication only stay ``unclassified``.
A trace without device work is classed by its host side: the operators that do the work, and the ranges of a CPU
backend.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.classes import (
    CLASS_INDEX,
    CLASSES,
    COLLECTIVE_KINDS,
    COMMUNICATION,
    COMPUTE,
    GROUP_LABELS,
    NONE,
    UNCLASSIFIED,
)
from drivetrain.trace.collective_kinds import kinds_by_context, kinds_by_name, kinds_from_arguments
from drivetrain.trace.groups import labels_of_groups
from drivetrain.trace.health import Finding
from drivetrain.trace.host_context import (
    HostPlaces,
    Ranges,
    host_places,
    own_places,
    used_names,
    working_operators,
)
from drivetrain.trace.lookup import flags
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.operator_regions import region_rows
from drivetrain.trace.recompute import recomputed
from drivetrain.trace.sequence import BackwardNodes
from drivetrain.trace.table import Category, EventTable, Trace

__all__ = ["CLASSES", "COLLECTIVE_KINDS", "GROUP_LABELS", "Classification", "classify"]

_Scalar = TypeVar("_Scalar", bound=np.generic)

_OTHER = CLASS_INDEX["compute.other"]
_COPY_OTHER = CLASS_INDEX["copy.other"]
_MEMSET = CLASS_INDEX["copy.memset"]
_IS_COMPUTE = flags(len(CLASSES), COMPUTE)
_KIND_INDEX = {kind: index for index, kind in enumerate(COLLECTIVE_KINDS)}

UNKNOWN_SHARE = 0.05
"""Share of kernel time without a rule above which the classification says so."""


@dataclass(frozen=True, eq=False)
class Classification:
    """One entry for each event of the table it was made from; arrays of shape (n,)."""

    kind: NDArray[np.uint8]
    """Index into ``CLASSES``."""
    collective_kind: NDArray[np.uint8]
    """Index into ``COLLECTIVE_KINDS``; 0 (unknown) for what is no communication."""
    parallel_group: NDArray[np.int32]
    """Index into ``GROUP_LABELS``; 0 (unknown) for what is no communication."""
    recompute: NDArray[np.bool_]
    """Compute that repeats forward work in the backward pass; ``kind`` keeps what it does. In a host view, every
    operator that is part of the repetition, whether it does the work itself or calls others."""
    named: NDArray[np.bool_]
    """Whether a rule knows the event's own name; False where the default or the operator decided."""
    host_view: bool
    """True: the trace has no device work, so the kinds are those of the operators that do the work
    (:func:`drivetrain.trace.host_context.working_operators`) and of host ranges."""
    table_identity: str
    """Version and digest of the name tables."""
    health: tuple[Finding, ...]

    def is_compute(self) -> NDArray[np.bool_]:
        """Mask of the ``compute.*`` events."""
        return _IS_COMPUTE[self.kind]

    def is_communication(self) -> NDArray[np.bool_]:
        """Mask of the communication events."""
        return np.equal(self.kind, COMMUNICATION)


@dataclass(frozen=True, eq=False)
class _Draft:
    """Classes of the rows of ``places``, in the making."""

    places: HostPlaces
    kind: NDArray[np.uint8]
    collective: NDArray[np.uint8]
    named: NDArray[np.bool_]


def classify(
    trace: Trace, rules: NameTable | None = None, *, layout: Mapping[str, int] | None = None
) -> Classification:
    """Class every event of a trace.

    Args:
        trace: a trace of any reader.
        rules: name tables, the latest where None.
        layout: size of each parallel dimension, fastest varying first, where the job's layout is known
            (:func:`drivetrain.trace.groups.label_of_ranks`).
    """
    table = NameTable.load() if rules is None else rules
    events = trace.events
    device_rows = np.flatnonzero(events.is_device_work())
    host_view = len(device_rows) == 0
    draft = _host_draft(events, table) if host_view else _device_draft(trace, table, device_rows)
    rows = draft.places.rows
    count = len(events)
    if host_view:
        operators = np.flatnonzero(events.category == Category.CPU_OP)
        repeated = _spread(count, operators, recomputed(events, own_places(events, operators), table))
    else:
        repeated = _spread(count, rows, recomputed(events, draft.places, table) & _IS_COMPUTE[draft.kind])
    return Classification(
        kind=_spread(count, rows, draft.kind),
        collective_kind=_spread(count, rows, draft.collective),
        parallel_group=_parallel_groups(trace, table, draft, layout),
        recompute=repeated,
        named=_spread(count, rows, draft.named),
        host_view=host_view,
        table_identity=table.identity,
        health=() if host_view else _findings(events, draft),
    )


def _spread(count: int, rows: NDArray[np.int64], values: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """Values of some rows as a whole column, zero elsewhere."""
    column = np.zeros(count, values.dtype)
    column[rows] = values
    return column


# ---- device work ------------------------------------------------------------------------------------------------


def _device_draft(trace: Trace, table: NameTable, rows: NDArray[np.int64]) -> _Draft:
    events = trace.events
    kind, collective, named, weak = _by_kernel_name(events, table, rows)
    places = host_places(events, rows)
    kind = _narrowed_by_operator(events, table, places, kind, weak, named)
    kind = _moved_by_context(events, table, places, kind)
    kind[_alone_among_communication(events, rows, kind, named)] = UNCLASSIFIED

    carries = np.flatnonzero(kind == COMMUNICATION)
    of_communication = HostPlaces(
        rows[carries],
        places.launch[carries],
        places.operator[carries],
        places.key[carries],
        places.time_ns[carries],
    )
    kinds = kinds_by_context(events, table, of_communication, collective[carries])
    collective[carries] = kinds_from_arguments(trace, table, of_communication, kinds)
    return _Draft(places, kind, collective, named)


def _by_kernel_name(
    events: EventTable, table: NameTable, rows: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.bool_], NDArray[np.bool_]]:
    """Class, kind of collective, whether a rule was found, whether it is weak; each of the shape of ``rows``."""
    names = len(events.names)
    kernel, copy = np.full(names, _OTHER, np.uint8), np.full(names, _COPY_OTHER, np.uint8)
    collective = np.zeros(names, np.uint8)
    named, weak = np.zeros(names, np.bool_), np.ones(names, np.bool_)
    category, name = events.category[rows], events.name[rows]
    for index in used_names(events, rows[category == Category.KERNEL]):
        rule = table.find("device", events.names[index])
        if rule is not None:
            kernel[index], named[index], weak[index] = CLASS_INDEX[rule.label], True, rule.weak
            collective[index] = _KIND_INDEX[rule.kind or "unknown"]
    for index in used_names(events, rows[category == Category.MEMCPY]):
        copy[index] = CLASS_INDEX[table.label("copy", events.names[index]) or "copy.other"]
    kind = np.where(category == Category.KERNEL, kernel[name], copy[name])
    kind[category == Category.MEMSET] = _MEMSET
    is_kernel = category == Category.KERNEL
    return kind, np.where(is_kernel, collective[name], 0), named[name] | ~is_kernel, weak[name] & is_kernel


def _narrowed_by_operator(
    events: EventTable,
    table: NameTable,
    places: HostPlaces,
    kind: NDArray[np.uint8],
    weak: NDArray[np.bool_],
    named: NDArray[np.bool_],
) -> NDArray[np.uint8]:
    """Classes of generic and unknown kernels, by the innermost operator that launched them."""
    open_rows = np.flatnonzero(weak & (places.operator >= 0) & _IS_COMPUTE[kind])
    if len(open_rows) == 0:
        return kind
    operators = places.operator[open_rows]
    narrower = np.full(len(events.names), NONE, np.uint8)
    for index in used_names(events, operators):
        label = table.label("host", events.names[index])
        if label is not None and label.startswith("compute."):
            narrower[index] = CLASS_INDEX[label]
    decided = narrower[events.name[operators]]
    decided[named[open_rows] & _SAYS_LITTLE[decided]] = NONE
    kind = kind.copy()
    kind[open_rows[decided != NONE]] = decided[decided != NONE]
    return kind


# Classes an operator gives by default: they do not overrule what a kernel's name says.
_SAYS_LITTLE = flags(
    len(CLASSES), [CLASS_INDEX[f"compute.{name}"] for name in ("other", "elementwise", "copy_cast")]
)


def _moved_by_context(
    events: EventTable, table: NameTable, places: HostPlaces, kind: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Classes of compute inside ranges that decide for all they contain; the first context of the table wins.

    A region of an operator decides for the backward nodes made in it, too.
    """
    kind = kind.copy()
    decided = np.zeros(len(kind), np.bool_)
    operators = np.flatnonzero(events.category == Category.CPU_OP)
    annotations = np.flatnonzero(events.category == Category.ANNOTATION)
    by_category = {"operator": operators, "annotation": annotations}
    nodes = BackwardNodes.made_in(events, region_rows(events))
    candidates_of = {
        categories: np.concatenate([by_category[category] for category in categories])
        for categories in {context.categories for context in table.contexts}
    }
    used_by = {categories: used_names(events, rows) for categories, rows in candidates_of.items()}
    for context in table.contexts:
        candidates = candidates_of[context.categories]
        hit = np.zeros(len(events.names), np.bool_)
        for index in used_by[context.categories]:
            hit[index] = context.pattern.search(events.names[index]) is not None
        rows = candidates[hit[events.name[candidates]]] if hit.any() else candidates[:0]
        if len(rows) == 0:
            continue
        if "annotation" in context.categories:
            rows = np.concatenate((rows, nodes.of(rows)))
        inside = Ranges.of(events, rows).contain(places.key, places.time_ns) & ~decided
        inside &= flags(len(CLASSES), [CLASS_INDEX[name] for name in context.covers])[kind]
        kind[inside] = CLASS_INDEX[context.label]
        decided |= inside
    return kind


def _alone_among_communication(
    events: EventTable, rows: NDArray[np.int64], kind: NDArray[np.uint8], named: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Kernels without a rule, on streams whose other kernels are all communication."""
    unknown: NDArray[np.bool_] = ~named & (kind == _OTHER) & (events.category[rows] == Category.KERNEL)
    if not unknown.any():
        return unknown
    stream = events.device[rows].astype(np.int64) * (len(events.streams) + 1) + events.stream[rows]
    carrying = np.unique(stream[kind == COMMUNICATION])
    computing = np.unique(stream[_IS_COMPUTE[kind] & ~unknown])
    only_communication = np.setdiff1d(carrying, computing)
    unknown &= (events.stream[rows] >= 0) & np.isin(stream, only_communication)
    return unknown


# ---- host view --------------------------------------------------------------------------------------------------


def _host_draft(events: EventTable, table: NameTable) -> _Draft:
    classes, heavy, light, helper = _host_names(events, table)
    operators = working_operators(events, light, heavy, helper)
    annotations = np.flatnonzero(events.category == Category.ANNOTATION)
    rows = np.concatenate((operators, annotations))
    kind = classes[events.name[rows]] if len(classes) else np.zeros(0, np.uint8)
    # A range is work only as a CPU backend's communication, or as a compiled graph (whose kernels may be unnamed).
    compiled = np.array(["CompiledFxGraph" in name for name in events.names], np.bool_)
    is_range = np.arange(len(rows)) >= len(operators)
    is_graph = compiled[events.name[rows]] if len(compiled) else is_range
    kind[is_range & ~is_graph & (kind != COMMUNICATION)] = NONE
    kept = kind != NONE
    rows, kind = rows[kept], kind[kept]
    places = own_places(events, rows)
    kind = _moved_by_context(events, table, places, kind)
    collective = np.zeros(len(rows), np.uint8)
    carries = np.flatnonzero(kind == COMMUNICATION)
    collective[carries] = kinds_by_name(events, table, rows[carries])
    return _Draft(places, kind, collective, np.ones(len(rows), np.bool_))


def _host_names(
    events: EventTable, table: NameTable
) -> tuple[NDArray[np.uint8], NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Over ``events.names``: class; heavy and light arithmetic; helpers (views, allocations, copies)."""
    count = len(events.names)
    classes = np.zeros(count, np.uint8)
    specific, helper = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    on_host = (events.category == Category.CPU_OP) | (events.category == Category.ANNOTATION)
    for index in used_names(events, on_host):
        rule = table.find("host", events.names[index])
        if rule is None:
            continue
        classes[index] = CLASS_INDEX[rule.label]
        helper[index] = rule.library == "metadata" or rule.label == "compute.copy_cast"
        specific[index] = rule.library not in ("metadata", "default") and rule.label.startswith("compute.")
    is_heavy = specific & _HEAVY[classes]
    return classes, is_heavy, specific & ~is_heavy, helper


_HEAVY = flags(
    len(CLASSES),
    [CLASS_INDEX[f"compute.{name}"] for name in ("matmul", "attention", "norm", "loss", "optimizer")],
)


# ---- groups and findings ----------------------------------------------------------------------------------------


def _parallel_groups(
    trace: Trace, table: NameTable, draft: _Draft, layout: Mapping[str, int] | None
) -> NDArray[np.int32]:
    """Index into ``GROUP_LABELS`` of each event; 0 for what is no communication."""
    events = trace.events
    labels, without = labels_of_groups(events.groups, trace.metadata, table, trace.world_size, layout)
    of_group = np.array(
        [*(GROUP_LABELS.index(label) for label in labels), GROUP_LABELS.index(without)], np.int32
    )
    carries = draft.kind == COMMUNICATION
    rows = draft.places.rows[carries]
    operator = draft.places.operator[carries]
    group = np.where((events.group[rows] < 0) & (operator >= 0), events.group[operator], events.group[rows])
    column = np.zeros(len(events), np.int32)
    column[rows] = of_group[group]  # -1, no group named: the last entry
    return column


def _findings(events: EventTable, draft: _Draft) -> tuple[Finding, ...]:
    rows = draft.places.rows
    kernels = events.category[rows] == Category.KERNEL
    duration = events.duration_ns[rows]
    total = int(duration[kernels].sum())
    findings = []
    open_rows = kernels & (draft.kind == UNCLASSIFIED)
    if open_rows.any():
        findings.append(
            Finding(
                "unclassified_kernels",
                "warning",
                f"{int(open_rows.sum())} kernels that no rule knows ran on streams that otherwise carry communication "
                f"only (the longest: {_longest(events, rows[open_rows])}); they may be communication: name them in "
                "a rules file",
                int(open_rows.sum()),
            )
        )
    unknown = kernels & ~draft.named & (draft.kind == _OTHER)
    share = int(duration[unknown].sum()) / total if total else 0.0
    if share > UNKNOWN_SHARE:
        findings.append(
            Finding(
                "unknown_kernels",
                "note",
                f"{share:.1%} of kernel time is in kernels that no rule knows, counted as compute.other (the longest: "
                f"{_longest(events, rows[unknown])})",
                int(unknown.sum()),
            )
        )
    return tuple(findings)


def _longest(events: EventTable, rows: NDArray[np.int64]) -> str:
    name = events.names[events.name[rows[np.argmax(events.duration_ns[rows])]]]
    return name if len(name) <= 80 else f"{name[:77]}..."
