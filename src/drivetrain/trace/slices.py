"""The split of a rank as instants: which class has the time when, cut at the borders of the windows.

An account keeps sums. What is drawn on a time axis needs the intervals they are sums of: the slices of a window are
disjoint, leave no gap, and add up, class by class, to its account.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drivetrain.measure.account import COMMUNICATION_PARTS, PARALLEL_GROUPS, View
from drivetrain.measure.intervals import Intervals, intersect, partition, subtract, union, union_of
from drivetrain.trace.collectives import POINT_TO_POINT_KINDS, CommunicationRecords
from drivetrain.trace.pipeline import WAITING, PipelineFacts, bubble_parts
from drivetrain.trace.steps import UNKNOWN_TIME

__all__ = ["RankSplit", "Slices", "class_slices", "communication_parts", "group_intervals", "last_ranks"]


@dataclass(frozen=True, eq=False)
class RankSplit:
    """Where the time of one rank went, on the rank's own clock."""

    rank: int
    view: View
    source: Path
    parts: Mapping[str, Intervals]
    """Class → when it took the time; pairwise disjoint."""
    windows: NDArray[np.int64]
    """Shape (1 + steps, 2): start and end of the whole trace's window and of each step's, ns."""
    numbers: tuple[int, ...]
    """Number of each step."""
    explained: bool
    """Whether time of no class is idle; else it is unexplained."""
    hidden: frozenset[str]
    """Groups of classes that are shown as unexplained, because their figures are withheld."""
    offset_ns: int | None
    """What to add to bring its times onto the first rank's clock; None: the clocks could not be aligned."""
    communication: CommunicationRecords
    arrived_ns: NDArray[np.int64]
    """Shape (k,), for each record of `communication` when its last rank had arrived; ``UNKNOWN_TIME`` where that
    cannot be told."""


@dataclass(frozen=True, eq=False)
class Slices:
    """Slices in order of time; arrays of shape (n,)."""

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    name: NDArray[np.int64]
    """Index into `names`."""
    names: tuple[str, ...]
    """Classes of the account, ``idle`` and ``unexplained`` included."""
    borders_ns: NDArray[np.int64]
    """All borders of windows, ascending: no slice reaches over one."""


def communication_parts(
    records: CommunicationRecords,
    arrived_ns: NDArray[np.int64],
    exposed: Intervals,
    pipeline: PipelineFacts | None,
) -> dict[str, Intervals]:
    """The classes of the exposed communication of one rank: by group, and into wait, transfer and the pipeline's
    bubble where several ranks tell.

    Args:
        records: the rank's communication.
        arrived_ns: see :attr:`RankSplit.arrived_ns`.
        exposed: communication while nothing computes.
        pipeline: phases of the rank's stage.
    """
    border = np.clip(arrived_ns, records.start_ns, records.end_ns)
    known = arrived_ns != UNKNOWN_TIME
    label = np.array(records.label, np.str_)
    sets: dict[str, Intervals] = {}
    for group in PARALLEL_GROUPS:
        mine = label == group
        both, neither = mine & known, mine & ~known
        sets[f"communication.{group}.wait"] = union(records.start_ns[both], border[both])
        sets[f"communication.{group}.transfer"] = union(border[both], records.end_ns[both])
        sets[f"communication.{group}.unsplit"] = union(records.start_ns[neither], records.end_ns[neither])
    names = [f"communication.{group}.{part}" for part in COMMUNICATION_PARTS for group in PARALLEL_GROUPS]
    parts = {
        name: intersect(part, exposed)
        for name, part in zip(names, partition([sets[name] for name in names]), strict=True)
    }
    if pipeline is not None and known.any():
        parts.update(bubble_parts(pipeline, records, arrived_ns, parts[WAITING]))
    return parts


def group_intervals(records: CommunicationRecords) -> dict[str, Intervals]:
    """Parallel group → when any of its collectives was under way; groups without any are left out."""
    label = np.array(records.label, np.str_)
    return {
        group: union(records.start_ns[label == group], records.end_ns[label == group])
        for group in PARALLEL_GROUPS
        if (label == group).any()
    }


def class_slices(split: RankSplit) -> Slices:
    """The class of every instant of all windows, without a gap, cut where any window begins or ends."""
    borders = np.unique(split.windows)
    region = union(split.windows[:, 0], split.windows[:, 1])
    cells = intersect(np.column_stack((borders[:-1], borders[1:])), region)
    rest = subtract(region, union_of(list(split.parts.values())))
    found: dict[str, list[Intervals]] = {}
    for name, part in (*split.parts.items(), ("idle", rest)):
        known = name.split(".")[0] not in split.hidden and (name != "idle" or split.explained)
        found.setdefault(name if known else "unexplained", []).append(intersect(cells, part))
    pieces = {name: np.concatenate(parts) for name, parts in found.items()}
    joined = np.concatenate(list(pieces.values()))
    index = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces.values()])
    order = np.argsort(joined[:, 0], kind="stable")
    start, end = joined[order, 0], joined[order, 1]
    assert np.all(end[:-1] <= start[1:]), "classes overlap"
    return Slices(start, end, index[order], tuple(pieces), borders)


def last_ranks(splits: Sequence[RankSplit]) -> dict[int, NDArray[np.int64]]:
    """Rank → for each record of its communication the rank that arrived last at it; -1: unknown, or not waited for.

    The records of one collective are known by the time that rank arrived, which is the same for all of them; several
    ranks that arrived in the same nanosecond are represented by the lowest.
    """
    keys = {split.rank: _collective_keys(split) for split in splits}
    last: dict[tuple[object, ...], int] = {}
    for split in sorted(splits, key=lambda one: one.rank):
        starts = split.communication.start_ns.tolist()
        for key, start, arrived in zip(keys[split.rank], starts, split.arrived_ns.tolist(), strict=True):
            if key is not None and start == arrived:
                last.setdefault(key, split.rank)
    found = {}
    for split in splits:
        mine = [-1 if key is None else last.get(key, -1) for key in keys[split.rank]]
        records = split.communication
        message = np.isin(np.array(records.kind, np.str_), list(POINT_TO_POINT_KINDS))
        waits = message & (split.arrived_ns > records.start_ns)
        found[split.rank] = np.where(waits & (records.peer >= 0), records.peer, np.array(mine, np.int64))
    return found


def _collective_keys(split: RankSplit) -> list[tuple[object, ...] | None]:
    """What is equal in the records of one collective on all ranks; None of a record that is not split."""
    records, offset = split.communication, split.offset_ns or 0
    return [
        None if arrived == UNKNOWN_TIME else (arrived + offset, kind, members)
        for arrived, kind, members in zip(
            split.arrived_ns.tolist(), records.kind, records.members, strict=True
        )
    ]
