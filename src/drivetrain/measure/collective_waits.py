"""The same collectives of several ranks: how long each waited for the last of them, and how long bytes then moved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain.measure.overlap import FlightRecord, turns

__all__ = ["GroupWaits", "Matched", "match", "summed"]


@dataclass(frozen=True, slots=True)
class Matched:
    """One collective of a group as all its ranks saw it.

    Attributes:
        ranks: of the group.
        queue: number of the group among those of the same ranks, in the order in which they were made.
        sequence: its number in the group.
        last: the rank that came last.
        wait_ns: by rank, from its turn to the last rank's.
        transfer_ns: by rank, from the last rank's turn to the completion.
        exposed_ns: by rank, the part of the transfer in which the training thread stood waiting for this collective.
        error_ns: by how much the waits may be off, because clocks are.
    """

    group: str
    kind: str
    bytes: int
    queue: int
    sequence: int
    ranks: tuple[int, ...]
    last: int
    wait_ns: Mapping[int, int]
    transfer_ns: Mapping[int, int]
    exposed_ns: Mapping[int, int]
    error_ns: int


def match(
    flights: Mapping[int, Sequence[FlightRecord]],
    members: Mapping[int, Mapping[str, Sequence[int]]],
    offsets_ns: Mapping[int, tuple[int, int]],
    *,
    lanes: int,
) -> list[Matched]:
    """The same collectives of several ranks, split into waiting for the last rank and transfer.

    Args:
        flights: by rank, of the same steps.
        members: by rank, queue → ranks of its group. Ranks may name one group differently, and several groups may
            have the same ranks: where not all ranks have the same names of those, names are taken in their order, as
            torch counts them up, and are not matched at all where a rank has fewer of them.
        offsets_ns: by rank, what its clock is ahead of a common one, and the bound of the error of that.
        lanes: as for :func:`turns`.

    Returns:
        Those of which every rank of the group has a complete flight, in order of group and number.
    """
    found: dict[tuple[tuple[int, ...], int, int], dict[int, tuple[FlightRecord, int]]] = {}
    numbers = _numbers(members)
    for rank, own in flights.items():
        complete = [flight for flight in own if flight.completed_ns is not None]
        for flight, (begins, _) in zip(complete, turns(complete, 0, lanes), strict=True):
            queue = numbers[rank].get(flight.queue)
            if queue is None:
                continue
            ranks = tuple(members[rank][flight.queue])
            found.setdefault((ranks, queue, flight.sequence), {})[rank] = flight, begins
    matched: list[Matched] = []
    for (ranks, queue, sequence), seen in sorted(found.items(), key=lambda item: item[0]):
        one = next(iter(seen.values()))[0]
        if set(seen) != set(ranks) or len({flight.kind for flight, _ in seen.values()}) > 1:
            continue
        arrivals = {rank: begins - offsets_ns[rank][0] for rank, (_, begins) in seen.items()}
        ends = {rank: (flight.completed_ns or 0) - offsets_ns[rank][0] for rank, (flight, _) in seen.items()}
        last = max(arrivals, key=lambda rank: arrivals[rank])
        # A rank may be done before the last has come (a broadcast's root), and clocks are off by a little.
        waits = {
            rank: max(0, min(arrivals[last], ends[rank]) - arrived) for rank, arrived in arrivals.items()
        }
        matched.append(
            Matched(
                group=one.group,
                kind=one.kind,
                bytes=one.bytes,
                queue=queue,
                sequence=sequence,
                ranks=ranks,
                last=last,
                wait_ns=waits,
                transfer_ns={
                    rank: max(0, ends[rank] - arrived - waits[rank]) for rank, arrived in arrivals.items()
                },
                exposed_ns={
                    rank: _waited_ns(flight, begins + waits[rank]) for rank, (flight, begins) in seen.items()
                },
                error_ns=max(offsets_ns[rank][1] + offsets_ns[last][1] for rank in ranks),
            )
        )
    return matched


def _waited_ns(flight: FlightRecord, since_ns: int) -> int:
    """For how long the training thread waited for a flight from a moment of its own clock to the flight's end."""
    ends = flight.completed_ns or 0
    return sum(max(0, min(end, ends) - max(start, since_ns)) for start, end in flight.blocked)


def _numbers(members: Mapping[int, Mapping[str, Sequence[int]]]) -> dict[int, dict[str, int]]:
    """By rank, queue → its number among those of the same ranks, equal on all of them; without those that are not told
    apart."""
    named: dict[tuple[int, ...], dict[int, list[str]]] = {}
    for rank, queues in members.items():
        for queue, ranks in queues.items():
            named.setdefault(tuple(ranks), {}).setdefault(rank, []).append(queue)
    numbers: dict[int, dict[str, int]] = {rank: {} for rank in members}
    for by_rank in named.values():
        for queues_of_rank in by_rank.values():
            # "10" was made after "9".
            queues_of_rank.sort(key=lambda name: (len(name), name))
        first, *others = by_rank.values()
        if any(len(one) != len(first) for one in others):
            common = set(first).intersection(*others)
            by_rank = {rank: [name for name in one if name in common] for rank, one in by_rank.items()}
        for rank, ordered in by_rank.items():
            numbers[rank].update({name: place for place, name in enumerate(ordered)})
    return numbers


@dataclass(slots=True)
class GroupWaits:
    """Sums over matched collectives of one group.

    Attributes:
        ranks: of the group.
        collectives: how many were matched.
        wait_ns, transfer_ns: by rank.
        times_last: by rank.
        error_ns: sum of the bounds of each wait's error.
    """

    group: str
    ranks: tuple[int, ...]
    collectives: int = 0
    wait_ns: dict[int, int] = field(default_factory=dict)
    transfer_ns: dict[int, int] = field(default_factory=dict)
    times_last: dict[int, int] = field(default_factory=dict)
    error_ns: int = 0


def summed(matched: Sequence[Matched]) -> list[GroupWaits]:
    """By name and ranks of the group, in order of first appearance."""
    found: dict[tuple[str, tuple[int, ...]], GroupWaits] = {}
    for one in matched:
        sums = found.setdefault((one.group, one.ranks), GroupWaits(one.group, one.ranks))
        sums.collectives += 1
        sums.error_ns += one.error_ns
        sums.times_last[one.last] = sums.times_last.get(one.last, 0) + 1
        for rank in one.ranks:
            sums.wait_ns[rank] = sums.wait_ns.get(rank, 0) + one.wait_ns[rank]
            sums.transfer_ns[rank] = sums.transfer_ns.get(rank, 0) + one.transfer_ns[rank]
    return list(found.values())
