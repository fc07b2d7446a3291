"""Stretches in which the device waited for the host to launch its next piece of work."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.host_context import host_places
from drivetrain.trace.table import EventTable, Trace

__all__ = ["LaunchBoundStretch", "launch_bound_stretches"]

QUEUED_BETWEEN = 2
"""Records that did not wait, between two that did, that do not end a stretch."""
NAMED_OPERATORS = 3


@dataclass(frozen=True)
class LaunchBoundStretch:
    """Consecutive device records of one device that started when the host got round to launching them."""

    device: int
    start_ns: int
    """When the device first ran dry."""
    end_ns: int
    """End of the last record that was waited for."""
    records: int
    waiting_ns: int
    """Time the device had nothing to do until the launch of its next record was done."""
    operators: tuple[tuple[str, int], ...]
    """The operators whose launches were waited for longest, with that time in ns; a call into the runtime where no
    operator was recorded around it."""


def launch_bound_stretches(trace: Trace, count: int = 20) -> tuple[LaunchBoundStretch, ...]:
    """The stretches with the most waiting, most first. Records without a known launch wait for nothing."""
    events = trace.events
    work = np.flatnonzero(events.is_device_work())
    found: list[LaunchBoundStretch] = []
    for device in np.unique(events.device[work]):
        found.extend(_of_device(events, work[events.device[work] == device], int(device)))
    found.sort(key=lambda stretch: -stretch.waiting_ns)
    return tuple(found[:count])


def _of_device(events: EventTable, rows: NDArray[np.int64], device: int) -> list[LaunchBoundStretch]:
    if len(rows) < 2:
        return []
    places = host_places(events, rows)
    start = events.start_ns[rows]
    dry = np.concatenate((start[:1], np.maximum.accumulate(events.end_ns[rows])[:-1]))
    launched = places.launch >= 0
    launch_end = np.where(launched, events.end_ns[places.launch], dry)
    waiting = np.clip(np.minimum(launch_end, start) - dry, 0, None)
    waited = np.flatnonzero(waiting > 0)
    if len(waited) == 0:
        return []
    breaks = np.flatnonzero(np.diff(waited) > QUEUED_BETWEEN + 1) + 1
    return [
        _stretch(events, rows, mine, waiting, dry, places.operator, places.launch, device)
        for mine in np.split(waited, breaks)
    ]


def _stretch(
    events: EventTable,
    rows: NDArray[np.int64],
    waited: NDArray[np.int64],
    waiting: NDArray[np.int64],
    dry: NDArray[np.int64],
    operator: NDArray[np.int64],
    launch: NDArray[np.int64],
    device: int,
) -> LaunchBoundStretch:
    by_name: Counter[str] = Counter()
    source = np.where(operator[waited] >= 0, operator[waited], launch[waited])
    for row, ns in zip(source.tolist(), waiting[waited].tolist(), strict=True):
        by_name[events.names[events.name[row]]] += ns
    first, last = int(waited[0]), int(waited[-1])
    return LaunchBoundStretch(
        device=device,
        start_ns=int(dry[first]),
        end_ns=int(events.end_ns[rows[last]]),
        records=last - first + 1,
        waiting_ns=int(waiting[waited].sum()),
        operators=tuple(by_name.most_common(NAMED_OPERATORS)),
    )
