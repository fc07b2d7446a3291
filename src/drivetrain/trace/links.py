"""A slow link or a slow rank: why the communication of a group takes as long as it does.

Two questions about the collectives of one kind in one group, answered apart. *Who arrives late?* If one rank is last
in most of them and is most of what is waited for, its compute between arrivals says whether it works longer than its
peers. *Do bytes move slowly?* Transfers begin when all have arrived, so no lateness is in them; they are compared with
the same payload in other groups of as many ranks, else, on a device, with the group's own best.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from drivetrain.measure.account import Collective, CommunicationVerdict, Loss
from drivetrain.measure.intervals import Intervals, intersect, total, total_within, union
from drivetrain.trace.collectives import CommunicationRecords, Match, bus_bandwidth
from drivetrain.trace.point_to_point import Exchange

__all__ = ["RankWork", "communication_verdicts", "compute_before"]

_LEAST = 4
"""Collectives, or transfers of one payload, below which nothing is said."""
_LEAST_FOR_OWN_BEST = 8
_LEAST_SHARE = 0.01
"""Of a step's time: a loss below this is none."""
_MOSTLY = 0.5
"""Of the collectives (last in), of the waiting (waited for), of the lateness (explained by compute)."""
_SLOWER = 1.5
"""Median transfer over that of the others above which a link is slow, if the quartiles do not overlap either."""
_SLOWER_THAN_BEST = 3.0
_BEST = 0.1
"""Quantile of the group's own transfers that stands for its best."""
_SLOW_SHARE = 0.25
"""Of a group's transfers that must be slow against its own best."""


@dataclass(frozen=True, eq=False)
class RankWork:
    """What of one rank the verdicts need."""

    records: CommunicationRecords
    exposed: Intervals
    splits: NDArray[np.int64]
    """Shape (k,), when waiting ended in each record, on the rank's clock."""
    compute_before_ns: NDArray[np.int64]
    """Shape (k,), compute until each record began."""
    on_device: bool
    """Whether the records are a device's: those of threads contain their scheduling."""


@dataclass(frozen=True)
class _Transfer:
    """The part of a collective in which all take part."""

    duration_ns: int
    exposed_ns: float
    """Mean over the ranks."""
    bandwidth: float | None


@dataclass(frozen=True)
class _Group:
    """Collectives of one kind among one set of ranks, in order of arrival."""

    label: str
    kind: str
    ranks: tuple[int, ...]
    rows: tuple[Mapping[int, int], ...]
    last: tuple[int, ...]
    payload: tuple[int | None, ...]
    transfers: tuple[_Transfer, ...]


_Key = tuple[str, str, int, int]
"""Label, kind, number of ranks and payload."""


@dataclass(frozen=True, eq=False)
class _Alike:
    """Transfers of the same label, kind, number of ranks and payload, by position of their group."""

    transfers: Mapping[_Key, Mapping[int, Sequence[_Transfer]]]
    durations: Mapping[_Key, Mapping[int, NDArray[np.float64]]]


@dataclass(frozen=True)
class _Lateness:
    rank: int | None = None
    cost_ns: float = 0.0
    compute_excess_ns: float | None = None
    loss: Loss | None = None


@dataclass(frozen=True)
class _Speed:
    excess_ns: float | None = None
    bandwidth: float | None = None
    reference_bandwidth: float | None = None
    reference: Literal["other_groups", "own_best"] | None = None
    is_slow: bool = False


def compute_before(compute: Intervals, times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Compute until each of some times, in ns; shape of `times`."""
    if len(compute) == 0:
        return np.zeros(len(times), np.int64)
    return total_within(compute, np.column_stack((np.full(len(times), compute[0, 0]), times)))


def communication_verdicts(
    work: Mapping[int, RankWork],
    matches: Sequence[Match],
    collectives: Sequence[Collective],
    exchanges: Sequence[Exchange],
    offsets: Mapping[int, int],
    span_ns: int,
    steps: int,
) -> tuple[CommunicationVerdict, ...]:
    """One verdict for each kind of collective in each group, and for each direction between two ranks.

    Args:
        work: rank → records and compute.
        matches: collectives, by arrival of their last rank.
        collectives: the same, as records.
        exchanges: messages.
        offsets: rank → ns to add to its times.
        span_ns: time recorded, in which a loss must count for something.
        steps: steps in it. Of numbered ones the first is left out where there are others.
    """
    previous = _previous(matches)
    numbered = [*(one.step for one in matches), *(one.step for one in exchanges)]
    numbers = {number for number in numbered if number is not None}
    if len(numbers) > 1:  # The profiler was starting in the first one, on every rank at another time.
        first = min(numbers)
        kept = [i for i, match in enumerate(matches) if match.step != first]
        matches, collectives = [matches[i] for i in kept], [collectives[i] for i in kept]
        exchanges = [one for one in exchanges if one.step != first]
        span_ns, steps = span_ns * (len(numbers) - 1) // len(numbers), len(numbers) - 1
    groups = [*_groups(work, matches, collectives), *_directions(work, exchanges, offsets)]
    alike = _alike(groups)
    verdicts = [
        _verdict(i, group, alike, work, previous, offsets, span_ns, steps) for i, group in enumerate(groups)
    ]
    return tuple(sorted(verdicts, key=lambda one: (not one.losses, -_lost(one), one.ranks, one.kind)))


def _lost(verdict: CommunicationVerdict) -> float:
    return verdict.late_ns_per_step + (verdict.excess_transfer_ns_per_step or 0.0)


# ---- what is compared -------------------------------------------------------------------------------------------


def _groups(
    work: Mapping[int, RankWork], matches: Sequence[Match], collectives: Sequence[Collective]
) -> list[_Group]:
    places: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for i, match in enumerate(matches):
        places.setdefault((match.label, match.kind, tuple(sorted(match.rows))), []).append(i)
    found = []
    for (label, kind, ranks), mine in places.items():
        rows = tuple(matches[i].rows for i in mine)
        exposed = _exposed_transfer(work, rows)
        found.append(
            _Group(
                label,
                kind,
                ranks,
                rows,
                tuple(collectives[i].last_rank for i in mine),
                tuple(collectives[i].bytes for i in mine),
                tuple(
                    _Transfer(collectives[i].transfer_ns, float(exposed[k]), collectives[i].bus_bandwidth)
                    for k, i in enumerate(mine)
                ),
            )
        )
    return found


def _directions(
    work: Mapping[int, RankWork], exchanges: Sequence[Exchange], offsets: Mapping[int, int]
) -> list[_Group]:
    """Messages of one rank to another; that the receiver waits is no lateness of the sender, but how pipelines run."""
    places: dict[tuple[str, int, int], list[Exchange]] = {}
    for one in exchanges:
        places.setdefault((one.label, one.sender, one.receiver), []).append(one)
    found = []
    for (label, sender, receiver), mine in places.items():
        rows = tuple({sender: one.sent, receiver: one.received} for one in mine)
        exposed = _exposed_transfer(work, tuple({receiver: one.received} for one in mine))
        transfers = []
        for k, one in enumerate(mine):
            theirs = work[receiver].records
            start = max(
                int(work[sender].records.posted_ns[one.sent]) + offsets[sender],
                int(theirs.posted_ns[one.received]) + offsets[receiver],
            )
            lasts = max(int(theirs.end_ns[one.received]) + offsets[receiver] - start, 0)
            transfers.append(_Transfer(lasts, float(exposed[k]), bus_bandwidth("send", one.bytes, 2, lasts)))
        last = tuple(sender for _ in mine)
        payload = tuple(one.bytes for one in mine)
        found.append(_Group(label, "send", (sender, receiver), rows, last, payload, tuple(transfers)))
    return found


def _exposed_transfer(work: Mapping[int, RankWork], rows: Sequence[Mapping[int, int]]) -> NDArray[np.float64]:
    """Exposed time of each collective after its last rank came, mean over its ranks."""
    sums = np.zeros(len(rows))
    counts = np.zeros(len(rows))
    for rank in sorted({rank for one in rows for rank in one}):
        mine = work[rank]
        places = np.array([i for i, one in enumerate(rows) if rank in one], np.intp)
        own = np.array([rows[i][rank] for i in places.tolist()], np.intp)
        ends = mine.records.end_ns[own]
        starts = np.clip(mine.splits[own], mine.records.start_ns[own], ends)
        sums[places] += total_within(mine.exposed, np.column_stack((starts, ends)))
        counts[places] += 1
    return np.asarray(sums / np.maximum(counts, 1))


def _previous(matches: Sequence[Match]) -> dict[tuple[int, int], int]:
    """(rank, row) → row of the collective before it among the same ranks, of any kind."""
    before: dict[tuple[int, ...], Mapping[int, int]] = {}
    found: dict[tuple[int, int], int] = {}
    for match in matches:
        ranks = tuple(sorted(match.rows))
        if ranks in before:
            found.update({(rank, row): before[ranks][rank] for rank, row in match.rows.items()})
        before[ranks] = match.rows
    return found


# ---- the two questions ------------------------------------------------------------------------------------------


def _verdict(
    index: int,
    group: _Group,
    alike: _Alike,
    work: Mapping[int, RankWork],
    previous: Mapping[tuple[int, int], int],
    offsets: Mapping[int, int],
    span_ns: int,
    steps: int,
) -> CommunicationVerdict:
    count = len(group.rows)
    significant_ns = max(_LEAST_SHARE * span_ns, 1.0)
    lateness, speed = _Lateness(), _Speed()
    reason = f"{count} seen, at least {_LEAST} needed" if count < _LEAST else None
    if count >= _LEAST:
        # In a pipeline every stage waits for its neighbour: that is its bubble and not lateness.
        if group.label != "pp" and group.kind != "send":
            lateness = _lateness(group, work, previous, offsets, significant_ns)
        on_device = all(work[rank].on_device for rank in group.ranks)
        # A message of the host's threads arrives when the receiver's are let run, which one way they are sooner: it
        # sends forward what it receives backward, between other work.
        if on_device or group.kind != "send":
            speed = _speed(index, group, alike, significant_ns, on_device)
        else:
            reason = (
                "a message between threads of the host arrives when those are scheduled, whatever the link"
            )
        if speed.reference is None and reason is None:
            reason = f"no other group of {len(group.ranks)} ranks moves the same payload, and " + (
                f"fewer than {_LEAST_FOR_OWN_BEST} transfers of one payload tell no best of its own"
                if on_device
                else "transfers by threads of the host differ by how those are scheduled"
            )
    if speed.bandwidth is None:
        every = [one.bandwidth for one in group.transfers if one.bandwidth is not None]
        speed = _Speed(bandwidth=median(every)) if every else speed
    losses: tuple[Loss, ...] = () if lateness.loss is None else (lateness.loss,)
    losses = (*losses, "slow_link") if speed.is_slow else losses
    return CommunicationVerdict(
        group=group.label,
        kind=group.kind,
        ranks=group.ranks,
        occurrences=count,
        losses=losses,
        late_rank=lateness.rank,
        late_ns_per_step=lateness.cost_ns / steps,
        compute_excess_ns_per_step=(
            None if lateness.compute_excess_ns is None else lateness.compute_excess_ns / steps
        ),
        transfer_ns_per_step=sum(one.exposed_ns for one in group.transfers) / steps,
        excess_transfer_ns_per_step=None if speed.excess_ns is None else speed.excess_ns / steps,
        bus_bandwidth=speed.bandwidth,
        reference_bandwidth=speed.reference_bandwidth,
        reference=speed.reference,
        reason=reason,
    )


def _lateness(
    group: _Group,
    work: Mapping[int, RankWork],
    previous: Mapping[tuple[int, int], int],
    offsets: Mapping[int, int],
    significant_ns: float,
) -> _Lateness:
    """The rank that is waited for most, and whether it stands out."""
    costs = {rank: _waiting_for(rank, group, work) for rank in sorted(set(group.last))}
    worst = max(costs, key=lambda rank: costs[rank])
    if costs[worst] == 0:
        return _Lateness()
    excess, late = _compute_excess(worst, group, work, previous, offsets)
    if late < _MOSTLY * costs[worst]:  # Most of it was at collectives that have none before them.
        excess = None
    stands_out = (
        costs[worst] >= significant_ns
        and costs[worst] >= _MOSTLY * sum(costs.values())
        and group.last.count(worst) > _MOSTLY * len(group.last)
    )
    loss: Loss | None = None
    if stands_out:
        loss = "slow_rank" if excess is not None and excess >= _MOSTLY * late else "late_rank"
    return _Lateness(worst, costs[worst], excess, loss)


def _waiting_for(last: int, group: _Group, work: Mapping[int, RankWork]) -> float:
    """Exposed waiting for one rank, mean over the others, no instant counted twice."""
    waited = 0
    for rank in group.ranks:
        if rank == last:
            continue
        mine = work[rank]
        rows = np.array(
            [rows[rank] for rows, who in zip(group.rows, group.last, strict=True) if who == last], np.intp
        )
        ends = np.minimum(mine.splits[rows], mine.records.end_ns[rows])
        waited += total(intersect(union(mine.records.start_ns[rows], ends), mine.exposed))
    return waited / (len(group.ranks) - 1)


def _compute_excess(
    last: int,
    group: _Group,
    work: Mapping[int, RankWork],
    previous: Mapping[tuple[int, int], int],
    offsets: Mapping[int, int],
) -> tuple[float | None, float]:
    """What a rank computed more than the median of the others since the collective before, and how late it came
    against their median; sums over the collectives it was last in that have one before them."""
    excess = late = 0.0
    known = False
    for rows, who in zip(group.rows, group.last, strict=True):
        if who != last or (last, rows[last]) not in previous:
            continue
        known = True
        computed = {
            rank: int(work[rank].compute_before_ns[row] - work[rank].compute_before_ns[previous[rank, row]])
            for rank, row in rows.items()
        }
        arrived = {rank: int(work[rank].records.start_ns[row]) + offsets[rank] for rank, row in rows.items()}
        excess += computed[last] - median(value for rank, value in computed.items() if rank != last)
        late += arrived[last] - median(value for rank, value in arrived.items() if rank != last)
    return (excess if known else None), late


def _alike(groups: Sequence[_Group]) -> _Alike:
    """Transfers that may be compared, sorted out by what must be the same; too few of a group tell nothing."""
    found: dict[_Key, dict[int, list[_Transfer]]] = {}
    for i, group in enumerate(groups):
        for size, one in zip(group.payload, group.transfers, strict=True):
            if size and one.bandwidth is not None:
                key = (group.label, group.kind, len(group.ranks), size)
                found.setdefault(key, {}).setdefault(i, []).append(one)
    enough = {
        key: {i: transfers for i, transfers in of_group.items() if len(transfers) >= _LEAST}
        for key, of_group in found.items()
    }
    durations = {
        key: {
            i: np.array([one.duration_ns for one in transfers], np.float64) for i, transfers in mine.items()
        }
        for key, mine in enough.items()
    }
    return _Alike(enough, durations)


def _speed(index: int, group: _Group, alike: _Alike, significant_ns: float, on_device: bool) -> _Speed:
    """The payload whose transfers lose most, against other groups where there are any, else its own best."""
    sizes = sorted({size for size in group.payload if size})
    keys = [(group.label, group.kind, len(group.ranks), size) for size in sizes]
    found = [speed for key in keys if (speed := _speed_of(index, key, alike, on_device)).reference]
    if not found:
        return _Speed()
    worst = max(found, key=lambda one: (one.is_slow, one.excess_ns or 0.0))
    lost = sum(one.excess_ns or 0.0 for one in found if one.is_slow)
    is_slow = worst.is_slow and lost >= significant_ns
    return _Speed(
        lost if worst.is_slow else worst.excess_ns,
        worst.bandwidth,
        worst.reference_bandwidth,
        worst.reference,
        is_slow,
    )


def _speed_of(index: int, key: _Key, alike: _Alike, on_device: bool) -> _Speed:
    mine = alike.transfers.get(key, {}).get(index, [])
    if not mine:
        return _Speed()
    durations = alike.durations[key][index]
    others = [theirs for i, theirs in alike.durations[key].items() if i != index]
    reference: Literal["other_groups", "own_best"]
    if others:
        theirs = np.concatenate(others)
        reference, best = "other_groups", float(np.median(theirs))
        is_slow = bool(
            np.median(durations) >= _SLOWER * best
            and np.quantile(durations, 0.25) > np.quantile(theirs, 0.75)
        )
    elif on_device and len(mine) >= _LEAST_FOR_OWN_BEST:
        reference, best = "own_best", float(np.quantile(durations, _BEST))
        is_slow = bool(np.mean(durations >= _SLOWER_THAN_BEST * best) >= _SLOW_SHARE)
    else:
        return _Speed()
    excess = sum(min(max(one.duration_ns - best, 0.0), one.exposed_ns) for one in mine)
    wire = median(one.bandwidth * one.duration_ns for one in mine if one.bandwidth is not None)
    bandwidth = wire / float(np.median(durations))
    return _Speed(excess, bandwidth, wire / best, reference, is_slow)
