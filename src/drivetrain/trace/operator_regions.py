"""Regions of drivetrain's operators in a trace: a call of an operator lies in one while a profiler runs.

What is done in a region and in the backward nodes made there is the operator's, whatever the kernels are called.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.measure.intervals import total, union
from drivetrain.trace.classes import CLASSES
from drivetrain.trace.host_context import Ranges, host_places, own_places
from drivetrain.trace.sequence import BackwardNodes
from drivetrain.trace.table import Category, EventTable

__all__ = ["REGION", "OperatorTotal", "operator_totals", "region_of_rows", "region_rows"]

REGION = re.compile(r"drivetrain/operator/(?P<operator>[^/]+)/(?P<backend>[^/]+)$")
"""The name of a region."""


@dataclass(frozen=True)
class OperatorTotal:
    """All calls of one operator that one backend served."""

    operator: str
    backend: str
    calls: int
    """Regions in the trace: forward calls, those that are repeated in the backward pass included."""
    forward_ns: int
    """Time in which compute of the regions ran (a union): kernels launched there; without a device the host operators
    that do the work."""
    forward_records: int
    """Kernels, or host operators, in ``forward_ns``."""
    backward_ns: int
    """The same of the backward nodes made in the regions."""
    backward_records: int
    kinds: Mapping[str, int]
    """Class of ``CLASSES`` → ns of both passes (a union)."""

    @property
    def total_ns(self) -> int:
        """Forward and backward."""
        return self.forward_ns + self.backward_ns

    def to_document(self) -> dict[str, Any]:
        """All fields, and the sum."""
        return {
            "operator": self.operator,
            "backend": self.backend,
            "calls": self.calls,
            "forward_ns": self.forward_ns,
            "forward_records": self.forward_records,
            "backward_ns": self.backward_ns,
            "backward_records": self.backward_records,
            "total_ns": self.total_ns,
            "kinds": dict(self.kinds),
        }


def region_rows(events: EventTable) -> NDArray[np.int64]:
    """Rows of the operators' regions, ascending."""
    is_region = np.array([REGION.match(name) is not None for name in events.names], np.bool_)
    if not is_region.any():
        return np.empty(0, np.int64)
    return np.flatnonzero((events.category == np.uint8(Category.ANNOTATION)) & is_region[events.name])


def operator_totals(
    events: EventTable, kind: NDArray[np.uint8], *, host_view: bool
) -> tuple[OperatorTotal, ...]:
    """Operators by backend, most time first; empty for a trace without regions of operators.

    Args:
        events: the table.
        kind: its classification, shape (n,).
        host_view: whether the classes are those of host operators.
    """
    regions = region_rows(events)
    if len(regions) == 0:
        return ()
    is_compute = np.array([name.startswith("compute.") for name in CLASSES], np.bool_)
    work = np.flatnonzero(is_compute[kind])
    places = own_places(events, work) if host_view else host_places(events, work)
    kind, start, end = kind[work], events.start_ns[work], events.end_ns[work]

    def time(mask: NDArray[np.bool_]) -> int:
        return total(union(start[mask], end[mask]))

    nodes = BackwardNodes.made_in(events, regions)
    found = []
    for name in np.unique(events.name[regions]).tolist():
        match = REGION.match(events.names[name])
        assert match is not None
        mine = regions[events.name[regions] == name]
        forward = Ranges.of(events, mine).contain(places.key, places.time_ns)
        # A forward pass that is repeated lies within a backward node.
        backward = Ranges.of(events, nodes.of(mine)).contain(places.key, places.time_ns) & ~forward
        either = forward | backward
        found.append(
            OperatorTotal(
                operator=match["operator"],
                backend=match["backend"],
                calls=len(mine),
                forward_ns=time(forward),
                forward_records=int(forward.sum()),
                backward_ns=time(backward),
                backward_records=int(backward.sum()),
                kinds={
                    CLASSES[index]: time(either & (kind == index))
                    for index in np.unique(kind[either]).tolist()
                },
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.total_ns, one.operator, one.backend)))


def region_of_rows(events: EventTable, rows: NDArray[np.int64], *, host_view: bool) -> NDArray[np.int64]:
    """Index into ``events.names`` of the region that each of some rows of work belongs to; -1: none. Shape (k,)."""
    found = np.full(len(rows), -1, np.int64)
    regions = region_rows(events)
    if len(regions) == 0:
        return found
    places = own_places(events, rows) if host_view else host_places(events, rows)
    nodes = BackwardNodes.made_in(events, regions)
    for name in np.unique(events.name[regions]).tolist():
        mine = regions[events.name[regions] == name]
        ranges = (Ranges.of(events, mine), Ranges.of(events, nodes.of(mine)))
        for one in ranges:
            found[one.contain(places.key, places.time_ns) & (found < 0)] = name
    return found
