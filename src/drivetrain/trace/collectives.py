"""Collectives across ranks: which record of one rank is which of another's, who waited and how fast bytes moved.

Matched are records of the same process group (by its set of ranks), step, kind and payload, in their order. Streams
and names do not count: ranks number streams and choose algorithms differently.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drivetrain.measure.account import Collective
from drivetrain.trace.classes import COLLECTIVE_KINDS

__all__ = [
    "BLOCKING_KINDS",
    "POINT_TO_POINT_KINDS",
    "CommunicationRecords",
    "Match",
    "bus_bandwidth",
    "collective_of",
    "match_collectives",
]

BLOCKING_KINDS = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "send_recv", "unknown"}
)
"""Kinds in which no rank is done before every rank has come: their ends tell how clocks differ."""

POINT_TO_POINT_KINDS = frozenset({"send", "recv", "send_recv"})
"""Between two ranks of a group, whatever its size. Kernels that send and receive also run all-to-all: outside a
pipeline, ``send_recv`` is taken for a collective of the whole group."""

_UNEVEN_KINDS = frozenset({"all_to_all", "send_recv", "gather", "scatter", "unknown"})
"""Kinds whose payload may differ by rank: their bytes do not tell records apart."""

_WIRE_FACTOR = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


@dataclass(frozen=True, eq=False)
class CommunicationRecords:
    """Communication of one rank, in order of start. All arrays have shape (k,)."""

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    label: tuple[str, ...]
    """``dp``, ``tp``, …, ``unknown`` of each record."""
    members: tuple[frozenset[int] | None, ...]
    """Ranks of the process group; None: unknown. The empty set stands for all ranks there are."""
    kind: tuple[str, ...]
    bytes: NDArray[np.int64]
    """Payload put in by this rank; -1: unknown."""
    step: NDArray[np.int64]
    """Number of the step it was launched in; -1: none known to be the same on every rank."""
    peer: NDArray[np.int64]
    """Rank that a send goes to or a receive comes from; -1: unknown, or a collective."""
    posted_ns: NDArray[np.int64]
    """When it was handed over; before `start_ns` where a range begins only once its message is on its way."""

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True)
class Match:
    """The records of one collective."""

    rows: Mapping[int, int]
    """Rank → row of its `CommunicationRecords`."""
    label: str
    kind: str
    bytes: int | None
    step: int | None

    @property
    def blocking(self) -> bool:
        """Whether all ranks end together."""
        return self.kind in BLOCKING_KINDS


_Key = tuple[frozenset[int], int, str, int]


def match_collectives(records: Mapping[int, CommunicationRecords]) -> tuple[list[Match], int]:
    """Find the records that are one collective.

    Args:
        records: rank → its communication.

    Returns:
        The matches, and how many records remained without counterpart although other ranks of their group are given.
    """
    ranks = frozenset(records)
    by_key: dict[_Key, dict[int, list[int]]] = {}
    for rank, mine in records.items():
        for row in range(len(mine)):
            members = mine.members[row]
            if members is None or _is_point_to_point(mine.kind[row], mine.label[row]):
                continue
            present = (members & ranks) if members else ranks
            size = -1 if mine.kind[row] in _UNEVEN_KINDS else int(mine.bytes[row])
            key = (present, int(mine.step[row]), mine.kind[row], size)
            by_key.setdefault(key, {}).setdefault(rank, []).append(row)
    matches: list[Match] = []
    alone = 0
    for (present, step, kind, _), rows in by_key.items():
        if len(present) < 2:
            continue
        counts = {len(rows.get(rank, ())) for rank in present}
        if len(counts) != 1 or set(rows) != set(present):
            alone += sum(len(found) for found in rows.values())
            continue
        for position in range(counts.pop()):
            chosen = {rank: rows[rank][position] for rank in sorted(present)}
            matches.append(_match(records, chosen, kind, step))
    return matches, alone


def _is_point_to_point(kind: str, label: str) -> bool:
    """Whether :mod:`drivetrain.trace.point_to_point` looks for the counterpart, and not the whole group."""
    return kind in ("send", "recv") or (kind == "send_recv" and label == "pp")


def _match(
    records: Mapping[int, CommunicationRecords], chosen: Mapping[int, int], kind: str, step: int
) -> Match:
    payload = max(int(records[rank].bytes[row]) for rank, row in chosen.items())
    labels = {records[rank].label[row] for rank, row in chosen.items()} - {"unknown"}
    label = labels.pop() if len(labels) == 1 else "unknown"
    return Match(chosen, label, kind, payload if payload >= 0 else None, step if step >= 0 else None)


def bus_bandwidth(kind: str, payload: int | None, ranks: int, transfer_ns: int) -> float | None:
    """Bytes per second over the busiest link, comparable between kinds and numbers of ranks (nccl-tests).

    With n ranks and b bytes put in by each: all-reduce ``2 b (n-1)/n``, reduce-scatter and all-to-all
    ``b (n-1)/n``, all-gather ``b (n-1)`` (what each receives), broadcast, reduce and send ``b``.
    """
    if payload is None or payload <= 0 or transfer_ns <= 0 or ranks < 2:
        return None
    if kind in _WIRE_FACTOR:
        wire = _WIRE_FACTOR[kind] * payload * (ranks - 1) / ranks
    elif kind == "all_gather":
        wire = float(payload * (ranks - 1))
    elif kind in ("broadcast", "reduce", "send"):
        wire = float(payload)
    else:
        return None
    return wire * 1e9 / transfer_ns


def collective_of(
    match: Match, records: Mapping[int, CommunicationRecords], offsets: Mapping[int, int], index: int
) -> Collective:
    """Wait and transfer of one collective, on aligned clocks.

    Args:
        match: its records.
        records: rank → communication.
        offsets: rank → ns to add to its times.
        index: position among all collectives.
    """
    starts = {rank: int(records[rank].start_ns[row]) + offsets[rank] for rank, row in match.rows.items()}
    ends = {rank: int(records[rank].end_ns[row]) + offsets[rank] for rank, row in match.rows.items()}
    last_start = max(starts.values())
    transfer = max(min(ends.values()) - last_start, 0)
    return Collective(
        index=index,
        group=match.label,
        kind=match.kind,
        bytes=match.bytes,
        last_rank=min(rank for rank, start in starts.items() if start == last_start),
        start_skew_ns=last_start - min(starts.values()),
        end_skew_ns=max(ends.values()) - min(ends.values()),
        transfer_ns=transfer,
        wait_ns={rank: last_start - start for rank, start in starts.items()},
        step=match.step,
        bus_bandwidth=bus_bandwidth(match.kind, match.bytes, len(starts), transfer),
    )


def last_start(match: Match, records: Mapping[int, CommunicationRecords], offsets: Mapping[int, int]) -> int:
    """When the last rank arrived, on the common clock."""
    return max(int(records[rank].start_ns[row]) + offsets[rank] for rank, row in match.rows.items())


def in_order(
    matches: Sequence[Match], records: Mapping[int, CommunicationRecords], offsets: Mapping[int, int]
) -> list[Match]:
    """Matches by the time their last rank arrived."""
    return sorted(matches, key=lambda match: last_start(match, records, offsets))


assert frozenset(COLLECTIVE_KINDS) >= BLOCKING_KINDS | POINT_TO_POINT_KINDS | _UNEVEN_KINDS
