"""Bring the clocks of ranks onto one: all ranks of a blocking collective end it together.

The difference of two ranks' ends, in the median over their common collectives, is the offset of their clocks; what
is left of the differences is the residual, which is published. Ranks that share messages only are aligned by cause and
effect: nothing is received before it was sent, in either direction. Ranks whose ends agree with no offset, or that
share nothing, are not aligned: nothing between them is compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.collectives import BLOCKING_KINDS, CommunicationRecords, Match
from drivetrain.trace.point_to_point import Exchange

__all__ = ["Alignment", "align"]

_NOISE_NS = 20_000
"""Ends of one collective differ by microseconds on one clock: an offset below this is none."""
_LEAST_TOLERANCE_NS = 2_000_000
"""Residuals up to this are the scheduling of threads, not of clocks."""
_APART_SHARE = 4
"""Recordings that do not overlap by their own clocks may be of two runs, whose collectives are as alike as their
steps: those end within a part of their duration only by being the same ones. Here a quarter, where others may spread
over the whole of it."""
_LEAST_SHARED = 3
"""Collectives needed to tell an offset: one or two fit any."""


@dataclass(frozen=True)
class Alignment:
    """How the ranks' clocks differ."""

    offsets_ns: Mapping[int, int]
    """Rank → what to add to its times; ranks that could not be aligned are missing."""
    residual_ns: int | None
    """Median over the collectives used of last end minus first end, offsets applied. Where messages alone align:
    half the widest span of offsets they leave open. None: nothing was used."""
    unaligned: Mapping[int, str]
    """Rank → why its clock could not be brought onto the others'."""
    contradicted: frozenset[int] = frozenset()
    """Those of `unaligned` whose collectives speak against being the others', rather than too few to tell."""


def align(
    records: Mapping[int, CommunicationRecords],
    matches: Sequence[Match],
    exchanges: Sequence[Exchange] = (),
) -> Alignment:
    """Offsets of all ranks against the lowest one.

    Args:
        records: rank → its communication, on its own clock.
        matches: collectives found on several ranks.
        exchanges: messages, for ranks that share no collective.
    """
    usable = [match for match in matches if match.blocking]
    ranks = sorted(records)
    offsets = {ranks[0]: 0}
    spans: list[int] = []
    unaligned: dict[int, str] = {}
    contradicted: set[int] = set()
    waiting = ranks[1:]
    progress = True
    while waiting and progress:
        progress = False
        for rank in list(waiting):
            shared = [match for match in usable if rank in match.rows and set(match.rows) & set(offsets)]
            messages = [] if shared else _messages_with(rank, exchanges, offsets)
            if not shared and not messages:
                continue
            waiting.remove(rank)
            progress = True
            if shared:
                found, problem = _offset(rank, shared, records, offsets)
            else:
                found, span, problem = _offset_by_messages(rank, messages, records, offsets)
                spans += [span] if problem is None else []
            if problem is None:
                offsets[rank] = found
            else:
                unaligned[rank] = problem
                if len(shared) >= _LEAST_SHARED:
                    contradicted.add(rank)
    for rank in waiting:
        unaligned[rank] = "it shares no collective with an aligned rank"
        if any(_have_common_group(records[rank], rank, records[other], other) for other in offsets):
            contradicted.add(rank)
    residual = _residual(usable, records, offsets)
    if residual is None and spans:
        residual = max(spans) // 2
    return Alignment(offsets, residual, unaligned, frozenset(contradicted))


def _have_common_group(
    mine: CommunicationRecords, rank: int, theirs: CommunicationRecords, other: int
) -> bool:
    """Whether both ranks record collectives of a group that both are in, which could have been matched."""

    def groups(records: CommunicationRecords) -> set[frozenset[int]]:
        pairs = zip(records.members, records.kind, strict=True)
        return {members for members, kind in pairs if members is not None and kind in BLOCKING_KINDS}

    return any(not members or {rank, other} <= members for members in groups(mine) & groups(theirs))


def _offset(
    rank: int,
    shared: Sequence[Match],
    records: Mapping[int, CommunicationRecords],
    offsets: Mapping[int, int],
) -> tuple[int, str | None]:
    """Offset of one rank, or why there is none."""
    differences = np.empty(len(shared), np.int64)
    durations = np.empty(len(shared), np.int64)
    for i, match in enumerate(shared):
        aligned = [other for other in match.rows if other in offsets]
        ends = [int(records[other].end_ns[match.rows[other]]) + offsets[other] for other in aligned]
        mine = match.rows[rank]
        # Ranks that end late were scheduled late: the earliest end is the collective's.
        differences[i] = min(ends) - int(records[rank].end_ns[mine])
        durations[i] = max(
            int(records[other].end_ns[row] - records[other].start_ns[row])
            for other, row in match.rows.items()
        )
    offset = int(np.median(differences))
    spread = int(np.median(np.abs(differences - offset)))
    apart = abs(offset) > max(_length(records[one]) for one in {rank, *offsets})
    lasts = int(np.median(durations))
    tolerance = max(_NOISE_NS, lasts // _APART_SHARE) if apart else max(_LEAST_TOLERANCE_NS, lasts)
    if abs(offset) <= max(_NOISE_NS, 3 * spread) and spread <= tolerance:
        return 0, None
    if len(shared) < _LEAST_SHARED:
        return 0, (
            f"its {len(shared)} shared collectives end {abs(offset) / 1e6:.3f} ms apart, too few to tell an offset "
            f"(at least {_LEAST_SHARED})"
        )
    if spread > tolerance:
        return 0, (
            f"after the best offset ({offset / 1e6:+.3f} ms) its collectives still end {spread / 1e6:.3f} ms apart in "
            f"the median, more than {tolerance / 1e6:.3f} ms of the {lasts / 1e6:.3f} ms they last: they are not the "
            "same collectives, or its clock drifts"
        )
    return offset, None


def _messages_with(rank: int, exchanges: Sequence[Exchange], offsets: Mapping[int, int]) -> list[Exchange]:
    """Messages between a rank and those that are aligned, if enough of them go either way."""
    sent = [one for one in exchanges if one.sender == rank and one.receiver in offsets]
    received = [one for one in exchanges if one.receiver == rank and one.sender in offsets]
    return sent + received if min(len(sent), len(received)) >= _LEAST_SHARED else []


def _offset_by_messages(
    rank: int,
    messages: Sequence[Exchange],
    records: Mapping[int, CommunicationRecords],
    offsets: Mapping[int, int],
) -> tuple[int, int, str | None]:
    """Offset of one rank, the span of those that fit, or why there is none.

    No receive ends before its send began: what the rank sends bounds its offset from above, what it receives from
    below. A receive that waited ends right after its send, so the bounds are close.
    """
    above: list[int] = []
    below: list[int] = []
    lasts: list[int] = []
    for one in messages:
        sent = int(records[one.sender].posted_ns[one.sent])
        ended = int(records[one.receiver].end_ns[one.received])
        lasts.append(ended - int(records[one.receiver].start_ns[one.received]))
        if one.sender == rank:
            above.append(ended + offsets[one.receiver] - sent)
        else:
            below.append(sent + offsets[one.sender] - ended)
    low, high = max(below), min(above)
    if low > high:
        problem = (
            f"whatever its offset, some message is received {(low - high) / 1e6:.3f} ms before it is sent: its clock "
            "drifts"
        )
        return 0, 0, problem
    tolerance = max(_LEAST_TOLERANCE_NS, int(np.median(lasts)))
    if high - low > 2 * tolerance:
        problem = (
            f"its messages leave an offset between {low / 1e6:+.3f} and {high / 1e6:+.3f} ms open, more than the "
            f"{tolerance / 1e6:.3f} ms either way that they last"
        )
        return 0, 0, problem
    offset = 0 if low <= 0 <= high else (low + high) // 2
    if abs(offset) > max(_length(records[one]) for one in {rank, *offsets}):
        problem = (
            f"its messages fit an offset of {offset / 1e6:+.3f} ms, longer than the recordings: two runs would fit "
            "as well"
        )
        return 0, 0, problem
    return offset, high - low, None


def _length(records: CommunicationRecords) -> int:
    return int(records.end_ns.max() - records.start_ns.min()) if len(records) else 0


def _residual(
    matches: Sequence[Match], records: Mapping[int, CommunicationRecords], offsets: Mapping[int, int]
) -> int | None:
    skews: list[int] = []
    for match in matches:
        if set(match.rows) <= set(offsets):
            ends: NDArray[np.int64] = np.array(
                [int(records[rank].end_ns[row]) + offsets[rank] for rank, row in match.rows.items()], np.int64
            )
            skews.append(int(ends.max() - ends.min()))
    return int(np.median(skews)) if skews else None
