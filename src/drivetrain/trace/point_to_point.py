"""Sends and receives: whom each record is with, and which receive takes what which send gave.

The peer of a record is named by its arguments (``Dst Rank`` and ``Src Rank`` of NCCL's kernels, the third input of
``c10d::send`` and ``c10d::recv_`` where shapes were recorded), or follows from a group of two ranks. Sends of one rank
to another arrive in their order, so the k-th send of a to b is the k-th receive of b from a.

A CPU backend's range begins when its operator has posted the message already, which may be received by then: a message
is posted when the operator begins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.collectives import POINT_TO_POINT_KINDS, CommunicationRecords, Match
from drivetrain.trace.groups import group_label, process_groups
from drivetrain.trace.host_context import thread_keys
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.table import Category, Trace

__all__ = ["Exchange", "match_exchanges", "with_peers"]

_HOST_OPERATORS = {"send": ("c10d::send",), "recv": ("c10d::recv_",)}
_PEER_INPUT = 2
"""Position of the peer, counted within the group, among the inputs of ``c10d::send`` and ``c10d::recv_``."""


@dataclass(frozen=True)
class Exchange:
    """One message: a send and the receive that takes it."""

    sender: int
    sent: int
    """Row of the sender's `CommunicationRecords`."""
    receiver: int
    received: int
    """Row of the receiver's."""
    label: str
    bytes: int | None
    step: int | None


def with_peers(
    trace: Trace,
    rows: NDArray[np.int64],
    records: CommunicationRecords,
    table: NameTable,
    layout: Mapping[str, int] | None,
) -> CommunicationRecords:
    """The records with the peer of each send and receive, and its group where only one can be meant.

    Records of CPU backends name no group. A send or receive is then of the job's only pipeline group that this rank
    is in, else of its only group of several ranks.

    Args:
        trace: where the records are from.
        rows: shape (k,), rows of its events that the records were made from, in the same order.
        records: the rank's communication.
        table: name tables.
        layout: sizes of the job's parallel dimensions, where known.
    """
    mine = np.flatnonzero(np.isin(records.kind, list(POINT_TO_POINT_KINDS))) if len(records) else rows[:0]
    if len(mine) == 0:
        return records
    members, labels = list(records.members), list(records.label)
    single = _only_group(trace, table, layout)
    everyone = None if trace.world_size is None else frozenset(range(trace.world_size))
    for row in mine.tolist():
        if trace.events.group[rows[row]] < 0 and single is not None:
            members[row] = single[0]
            labels[row] = single[1] if labels[row] in ("unknown", "world") else labels[row]
        if not members[row]:
            members[row] = everyone if members[row] is not None else None
    operators = _operators(trace, rows, mine, records)
    posted = records.posted_ns.copy()
    known = operators >= 0
    posted[mine[known]] = trace.events.start_ns[operators[known]]
    of_row = dict(zip(mine.tolist(), operators.tolist(), strict=True))
    peer = np.full(len(records), -1, np.int64)
    asked: dict[int, int] = {}
    for row in mine.tolist():
        group = members[row]
        is_collective = records.kind[row] == "send_recv" and labels[row] != "pp"
        if group is None or trace.rank not in group or is_collective:
            continue
        if len(group) == 2:
            peer[row] = next(rank for rank in group if rank != trace.rank)
        else:
            asked[row] = of_row[row]
    for row, found in _peers(trace, asked, members).items():
        peer[row] = found
    return replace(records, members=tuple(members), label=tuple(labels), peer=peer, posted_ns=posted)


def _only_group(
    trace: Trace, table: NameTable, layout: Mapping[str, int] | None
) -> tuple[frozenset[int], str] | None:
    """Ranks and label of the group that a record without one must be of; None: several could be meant."""
    known = [
        (frozenset(group.ranks), group_label(group, table, trace.world_size, layout))
        for group in process_groups(trace.metadata)
        if len(group.ranks) > 1 and trace.rank in group.ranks
    ]
    pipelines = {found for found in known if found[1] == "pp"}
    if len(pipelines) == 1:
        return pipelines.pop()
    return known[0] if len(set(known)) == 1 else None


def _operators(
    trace: Trace, rows: NDArray[np.int64], mine: NDArray[np.int64], records: CommunicationRecords
) -> NDArray[np.int64]:
    """Row that has the arguments of each send and receive: of a kernel its own, of a range the operator it began in;
    -1: unknown. Shape of `mine`."""
    events = trace.events
    places = rows[mine]
    on_host = ~events.is_device_work()[places]
    kinds = np.array(records.kind, np.str_)[mine]
    found = np.where(on_host, -1, places)
    for kind, names in _HOST_OPERATORS.items():
        wanted = on_host & (kinds == kind)
        if not wanted.any():
            continue
        known = [i for i, name in enumerate(events.names) if name in names]
        candidates = np.flatnonzero(
            (events.category == np.uint8(Category.CPU_OP)) & np.isin(events.name, known)
        )
        found[wanted] = _around(trace, candidates, places[wanted])
    return found


def _peers(
    trace: Trace, asked: Mapping[int, int], members: Sequence[frozenset[int] | None]
) -> dict[int, int]:
    """Row of a record → global rank of its peer, by the arguments of the row of `asked`; those that tell it."""
    known = {row: place for row, place in asked.items() if place >= 0}
    found: dict[int, int] = {}
    for row, arguments in zip(known, trace.arguments(list(known.values())), strict=True):
        group = members[row]
        assert group is not None
        peer = _named_peer(arguments, sorted(group))
        if peer in group and peer != trace.rank:
            found[row] = peer
    return found


def _around(trace: Trace, operators: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row the last of `operators` on its thread that it began in; -1: in none."""
    events = trace.events
    found = np.full(len(rows), -1, np.int64)
    keys, of_operator = thread_keys(events, rows), thread_keys(events, operators)
    for key in np.unique(keys):
        mine, theirs = np.flatnonzero(keys == key), operators[of_operator == key]
        if len(theirs) == 0:
            continue
        times = events.start_ns[rows[mine]]
        place = np.searchsorted(events.start_ns[theirs], times, side="right") - 1
        inside = (place >= 0) & (times <= events.end_ns[theirs[np.maximum(place, 0)]])
        found[mine[inside]] = theirs[place[inside]]
    return found


def _named_peer(arguments: Mapping[str, Any], group: Sequence[int]) -> int:
    for key in ("Dst Rank", "Src Rank"):
        number = _number(arguments.get(key))
        if number is not None:
            return number
    inputs = arguments.get("Concrete Inputs")
    if isinstance(inputs, list) and len(inputs) > _PEER_INPUT:
        place = _number(inputs[_PEER_INPUT])
        if place is not None and place < len(group):
            return group[place]
    return -1


def _number(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 10 else None


_Key = tuple[int, int, int, str]


def match_exchanges(
    records: Mapping[int, CommunicationRecords],
) -> tuple[list[Exchange], list[Match], int]:
    """Find the receive of each send.

    Args:
        records: rank → its communication, with peers.

    Returns:
        Messages; kernels that send and receive at once, matched with their peer's; and how many records remained
        without counterpart although their peer is given.
    """
    by_key: dict[_Key, list[int]] = {}
    for rank, mine in records.items():
        for row in np.flatnonzero(mine.peer >= 0).tolist():
            if int(mine.peer[row]) in records:
                key = (rank, int(mine.peer[row]), int(mine.step[row]), mine.kind[row])
                by_key.setdefault(key, []).append(row)
    exchanges: list[Exchange] = []
    both: list[Match] = []
    alone = 0
    for (rank, peer, step, kind), rows in by_key.items():
        theirs = by_key.get((peer, rank, step, _COUNTERPART[kind]), [])
        if len(rows) != len(theirs) or not _same_bytes(kind, records[rank], rows, records[peer], theirs):
            alone += len(rows)
            continue
        number = step if step >= 0 else None
        for own, other in zip(rows, theirs, strict=True):
            payload = max(int(records[rank].bytes[own]), int(records[peer].bytes[other]))
            size = payload if payload >= 0 else None
            label = records[rank].label[own]
            if kind == "send":
                exchanges.append(Exchange(rank, own, peer, other, label, size, number))
            elif kind == "send_recv" and rank < peer:
                both.append(Match({rank: own, peer: other}, label, kind, size, number))
    return exchanges, both, alone


_COUNTERPART = {"send": "recv", "recv": "send", "send_recv": "send_recv"}


def _same_bytes(
    kind: str,
    mine: CommunicationRecords,
    rows: Sequence[int],
    theirs: CommunicationRecords,
    others: Sequence[int],
) -> bool:
    """Whether the payloads agree, so that the order of the records can be that of the messages."""
    if kind == "send_recv":  # Each side records what it puts in.
        return True
    own, other = mine.bytes[list(rows)], theirs.bytes[list(others)]
    return bool(np.all((own == other) | (own < 0) | (other < 0)))


assert frozenset(_COUNTERPART) == POINT_TO_POINT_KINDS
