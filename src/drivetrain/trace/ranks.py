"""What is compared across ranks, and whether it may be: one job, one clock, and which ranks are absent.

A rank's events are not kept for this: a `RankFacts` holds its communication, the time in which that communication
was exposed, and what identifies the job. So memory does not grow with the size of the other ranks' files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drivetrain.errors import DataError
from drivetrain.measure.account import Collective, CommunicationVerdict, Straggler
from drivetrain.measure.intervals import Intervals, intersect, total, union
from drivetrain.trace.clocks import Alignment, align
from drivetrain.trace.collectives import (
    CommunicationRecords,
    Match,
    collective_of,
    in_order,
    last_start,
    match_collectives,
)
from drivetrain.trace.health import Finding
from drivetrain.trace.links import RankWork, communication_verdicts
from drivetrain.trace.pipeline import PipelineFacts
from drivetrain.trace.point_to_point import Exchange, match_exchanges
from drivetrain.trace.steps import UNKNOWN_TIME

__all__ = ["Comparison", "RankFacts", "absent_ranks", "check_one_job", "compare_ranks", "distinct_ranks"]

_HOUR_NS = 3_600_000_000_000


@dataclass(frozen=True, eq=False)
class RankFacts:
    """What of one rank is needed once its events are gone."""

    path: Path
    rank: int | None
    world_size: int | None
    backend: str | None
    groups: frozenset[tuple[int, ...]]
    """Sets of ranks of the process groups the file names."""
    step_numbers: tuple[int, ...]
    """Of ``ProfilerStep`` ranges; empty without."""
    start_ns: int
    end_ns: int
    communication: CommunicationRecords
    exposed: Intervals
    """Communication while nothing computed."""
    steps: int
    """Steps recorded, of any origin."""
    compute_before_ns: NDArray[np.int64]
    """Shape (k,), compute until each record of `communication` began."""
    on_device: bool
    """Whether the records are a device's, not those of threads on the host."""
    pipeline: PipelineFacts | None = None
    """Phases of a pipeline's stage."""


def distinct_ranks(facts: Sequence[RankFacts]) -> tuple[list[int], tuple[Finding, ...]]:
    """Rank of each trace; those without one get the free numbers, in the order given.

    Raises:
        DataError: two traces of one rank.
    """
    known: dict[int, Path] = {}
    for fact in facts:
        if fact.rank is None:
            continue
        if fact.rank in known:
            raise DataError(
                f"{known[fact.rank]} and {fact.path} are both of rank {fact.rank}: give one trace a rank, "
                "of one job and one window"
            )
        known[fact.rank] = fact.path
    free = (number for number in range(len(facts) + len(known)) if number not in known)
    ranks = [next(free) if fact.rank is None else fact.rank for fact in facts]
    nameless = [fact for fact in facts if fact.rank is None]
    if not nameless or len(facts) == 1:
        return ranks, ()
    message = f"{len(nameless)} traces name no rank (first: {nameless[0].path}); they were numbered in the order given"
    return ranks, (Finding("rank_unknown", "warning", message, len(nameless)),)


def check_one_job(facts: Sequence[RankFacts]) -> None:
    """Refuse traces that cannot be of one job.

    Raises:
        DataError: world sizes, backends, process groups, step numbers or times that exclude each other.
    """
    first = facts[0]
    for other in facts[1:]:
        reason = _contradiction(first, other)
        if reason is not None:
            raise DataError(f"{first.path} and {other.path} are not of one job: {reason}")
    sizes = [fact.world_size for fact in facts if fact.world_size is not None]
    for fact in facts:
        if sizes and fact.rank is not None and fact.rank >= sizes[0]:
            raise DataError(f"{fact.path} is of rank {fact.rank}, but the job has {sizes[0]} ranks")


def _contradiction(first: RankFacts, other: RankFacts) -> str | None:
    if None not in (first.world_size, other.world_size) and first.world_size != other.world_size:
        return f"world sizes {first.world_size} and {other.world_size}"
    if None not in (first.backend, other.backend) and first.backend != other.backend:
        return f"backends {first.backend} and {other.backend}"
    shared = (first.rank, other.rank)
    for mine, theirs in ((first.groups, other.groups), (other.groups, first.groups)):
        lacking = [group for group in mine if set(shared) <= set(group) and theirs and group not in theirs]
        if lacking:
            return f"one has a process group of ranks {list(lacking[0])}, the other has none of these ranks"
    if first.step_numbers and other.step_numbers and not set(first.step_numbers) & set(other.step_numbers):
        return f"steps {_span(first.step_numbers)} and {_span(other.step_numbers)}: no step in common"
    apart = _apart(first, other)
    if apart > _HOUR_NS:
        return f"recorded {apart / _HOUR_NS:.1f} hours apart"
    return None


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def absent_ranks(ranks: Sequence[int], world_size: int | None) -> tuple[int, ...]:
    """Ranks of the job without a trace."""
    return tuple(sorted(set(range(world_size or 0)) - set(ranks)))


@dataclass(frozen=True)
class Comparison:
    """What several ranks tell together."""

    collectives: tuple[Collective, ...]
    residual_ns: int | None
    offsets_ns: Mapping[int, int]
    splits: Mapping[int, NDArray[np.int64]]
    """Rank → for each row of its communication the time at which waiting ended, on its own clock;
    `UNKNOWN_TIME` where that cannot be told."""
    stragglers: tuple[Straggler, ...]
    verdicts: tuple[CommunicationVerdict, ...]
    health: tuple[Finding, ...]


def compare_ranks(facts: Mapping[int, RankFacts]) -> Comparison:
    """Align clocks, split collectives into waiting and transfer, and find who is waited for.

    Args:
        facts: rank → facts, of one job.

    Raises:
        DataError: a rank was recorded at another time than all others, and its collectives are not theirs.
    """
    records = {rank: fact.communication for rank, fact in facts.items()}
    splits = {rank: np.full(len(mine), UNKNOWN_TIME, np.int64) for rank, mine in records.items()}
    matches, alone = match_collectives(records)
    exchanges, both, lonely = match_exchanges(records)
    matches += both
    alignment = align(records, matches, exchanges)
    _refuse_another_time(facts, alignment)
    health = _findings(facts, len(matches) + len(exchanges), alone + lonely, alignment)
    if alignment.unaligned or alignment.residual_ns is None:
        return Comparison((), None, {}, splits, (), (), health)
    offsets = alignment.offsets_ns
    ordered = in_order(matches, records, offsets)
    collectives = tuple(collective_of(match, records, offsets, i) for i, match in enumerate(ordered))
    for match in ordered:
        arrived = last_start(match, records, offsets)
        for rank, row in match.rows.items():
            splits[rank][row] = arrived - offsets[rank]
    for exchange in exchanges:
        _split_exchange(exchange, records, offsets, splits)
    stragglers = _stragglers(facts, ordered, collectives, splits)
    work = {
        rank: RankWork(fact.communication, fact.exposed, splits[rank], fact.compute_before_ns, fact.on_device)
        for rank, fact in facts.items()
    }
    span = _span_of_steps(facts)
    verdicts = communication_verdicts(work, ordered, collectives, exchanges, offsets, *span)
    return Comparison(collectives, alignment.residual_ns, offsets, splits, stragglers, verdicts, health)


def _span_of_steps(facts: Mapping[int, RankFacts]) -> tuple[int, int]:
    """How long was recorded, in ns, and in how many steps (1 where there are none), of the rank with the least."""
    return (
        min(fact.end_ns - fact.start_ns for fact in facts.values()),
        max(1, min(fact.steps for fact in facts.values())),
    )


def _split_exchange(
    exchange: Exchange,
    records: Mapping[int, CommunicationRecords],
    offsets: Mapping[int, int],
    splits: Mapping[int, NDArray[np.int64]],
) -> None:
    """A receive waits until its send began, a send until its receive did, unless it was over by then (buffered)."""
    sender, receiver = records[exchange.sender], records[exchange.receiver]
    ahead = offsets[exchange.sender] - offsets[exchange.receiver]
    sent, received = int(sender.posted_ns[exchange.sent]), int(receiver.posted_ns[exchange.received]) - ahead
    splits[exchange.receiver][exchange.received] = sent + ahead
    buffered = int(sender.end_ns[exchange.sent]) <= received
    splits[exchange.sender][exchange.sent] = sent if buffered else received


def _refuse_another_time(facts: Mapping[int, RankFacts], alignment: Alignment) -> None:
    """Refuse ranks that no clock explains: recorded at another time, of other collectives."""
    for rank in sorted(alignment.contradicted):
        others = [fact for other, fact in facts.items() if other != rank and len(fact.communication)]
        near = min(others, key=lambda other: _apart(facts[rank], other))
        apart = _apart(facts[rank], near)
        if apart > 0:
            raise DataError(
                f"{near.path} and {facts[rank].path} are not of one job, or not of one window of it: recorded "
                f"{apart / 1e9:.3f} s apart, and for rank {rank} {alignment.unaligned[rank]}"
            )


def _apart(first: RankFacts, other: RankFacts) -> int:
    """Time between two recordings, by their own clocks; 0 or less where they overlap."""
    return max(first.start_ns, other.start_ns) - min(first.end_ns, other.end_ns)


def _findings(
    facts: Mapping[int, RankFacts], matched: int, alone: int, alignment: Alignment
) -> tuple[Finding, ...]:
    found: list[Finding] = []
    if not any(len(fact.communication) for fact in facts.values()):
        message = f"none of the {len(facts)} ranks records communication: nothing is compared between them"
        return (Finding("no_communication", "warning", message, len(facts)),)
    if alone:
        found.append(
            Finding(
                "unmatched_collectives",
                "warning",
                f"{alone} records of communication have no counterpart on every rank that takes part: their time is "
                "not split into wait and transfer",
                alone,
            )
        )
    if alignment.unaligned:
        reasons = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(alignment.unaligned.items()))
        found.append(
            Finding(
                "clocks_unaligned",
                "error",
                f"the clocks of the ranks could not be aligned, so nothing between them is compared ({reasons})",
                len(alignment.unaligned),
                ("collectives", "clock_residual_ns"),
            )
        )
    moved = {rank: offset for rank, offset in alignment.offsets_ns.items() if offset}
    if moved and not alignment.unaligned:
        shown = ", ".join(f"rank {rank} by {offset / 1e6:+.3f} ms" for rank, offset in sorted(moved.items()))
        residual = (alignment.residual_ns or 0) / 1e6
        found.append(
            Finding(
                "clocks_shifted",
                "note",
                f"clocks differ and were aligned by {matched} shared collectives and messages: {shown}; what is left "
                f"is {residual:.3f} ms",
                len(moved),
            )
        )
    return tuple(found)


def _stragglers(
    facts: Mapping[int, RankFacts],
    matches: Sequence[Match],
    collectives: Sequence[Collective],
    splits: Mapping[int, NDArray[np.int64]],
) -> tuple[Straggler, ...]:
    """Ranks that arrived last, by what their lateness cost: exposed waiting of the others."""
    waiting: dict[tuple[int, int], list[int]] = {}
    times: dict[int, int] = {}
    for match, collective in zip(matches, collectives, strict=True):
        times[collective.last_rank] = times.get(collective.last_rank, 0) + 1
        for rank, row in match.rows.items():
            waiting.setdefault((collective.last_rank, rank), []).append(row)
    steps = max(1, min(fact.steps for fact in facts.values()))
    found: list[Straggler] = []
    for last, count in times.items():
        cost = 0
        for rank, fact in facts.items():
            rows = np.array(waiting.get((last, rank), ()), np.intp)
            starts = fact.communication.start_ns[rows]
            ends = np.minimum(splits[rank][rows], fact.communication.end_ns[rows])
            cost += total(intersect(union(starts, ends), fact.exposed)) if rank != last else 0
        found.append(Straggler(last, count, len(collectives), cost / (len(facts) - 1) / steps))
    return tuple(sorted(found, key=lambda straggler: (-straggler.cost_ns_per_step, straggler.rank)))
