"""What the ranks of a run waited for each other, from the collectives in their own files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.archive.reader import Run
from drivetrain.errors import RunError
from drivetrain.measure.collective_waits import GroupWaits, Matched, match, summed
from drivetrain.measure.overlap import FlightRecord, flights_of

__all__ = ["CLOCK_DRIFT", "RunCollectives", "RunWaits", "collectives_of_run", "waits_of_run"]

CLOCK_DRIFT = 1e-4
"""Share by which the clocks of two hosts may drift apart after they were compared: what a time service corrects at
most, and far above what two crystals differ by."""


@dataclass(frozen=True)
class RunCollectives:
    """The matched collectives of the steady steps that every rank has logged.

    Attributes:
        steps: how many.
        matched: in order of the steps; what passes the end of a step is there once.
    """

    steps: int
    matched: Sequence[Matched]


@dataclass(frozen=True)
class RunWaits:
    """Sums over the steady steps that every rank has logged.

    Attributes:
        steps: how many.
        groups: by name and ranks of the group.
    """

    steps: int
    groups: Sequence[GroupWaits]


@dataclass(frozen=True)
class _Line:
    """One step of one rank."""

    flights: Sequence[FlightRecord]
    offset_ns: int
    error_ns: int
    at_ns: int
    host: str
    lanes: int


def waits_of_run(run: Run) -> RunWaits | None:
    """Sums of :func:`collectives_of_run` by group.

    Raises:
        RunError: a line is damaged.
    """
    found = collectives_of_run(run)
    return None if found is None else RunWaits(found.steps, summed(found.matched))


def collectives_of_run(run: Run) -> RunCollectives | None:
    """Match the collectives of the run's ranks; None where they were not written (``monitor.log_rank_times``).

    Raises:
        RunError: a line is damaged.
    """
    tagged = {line["step"] for line in run.metrics() if line.get("tags")}
    by_rank: dict[int, dict[int, _Line]] = {}
    members: dict[int, dict[str, Sequence[int]]] = {}
    for rank, lines in run.ranks().items():
        for line in lines:
            kept = line.get("collectives")
            if kept is None:
                continue
            try:
                members.setdefault(rank, {}).update(kept["queues"])
                by_rank.setdefault(rank, {})[line["step"]] = _line(kept)
            except (KeyError, TypeError, ValueError) as error:
                raise RunError(
                    f"{run.path}: the collectives of rank {rank} in step {line.get('step')} are damaged: {error!r}"
                ) from error
    if not by_rank:
        return None
    everywhere = set.intersection(*(set(steps) for steps in by_rank.values())) - tagged
    matched: list[Matched] = []
    former: set[tuple[Sequence[int], int, int]] = set()
    for step in sorted(everywhere):
        found = {
            (one.ranks, one.queue, one.sequence): one
            for one in _matched({rank: steps[step] for rank, steps in by_rank.items()}, members)
        }
        # What was under way at the end of a step is in the lines of both; it has passed once.
        matched += [one for key, one in found.items() if key not in former]
        former = set(found)
    return RunCollectives(len(everywhere), matched)


def _line(kept: Mapping[str, Any]) -> _Line:
    clock = kept["clock"]
    return _Line(
        flights=flights_of(kept["flights"]),
        offset_ns=int(clock["offset_ns"]),
        error_ns=int(clock["error_ns"]),
        at_ns=int(clock["at_ns"]),
        host=str(clock["host"]),
        lanes=int(kept["lanes"]),
    )


def _matched(lines: Mapping[int, _Line], members: Mapping[int, Mapping[str, Sequence[int]]]) -> list[Matched]:
    first = lines[min(lines)]
    offsets: dict[int, tuple[int, int]] = {}
    for rank, line in lines.items():
        since = max((flight.issued_ns - line.at_ns for flight in line.flights), default=0)
        drift = round(max(0, since) * CLOCK_DRIFT) if line.host != first.host else 0
        offsets[rank] = line.offset_ns, line.error_ns + drift
    flights = {rank: line.flights for rank, line in lines.items()}
    return match(flights, members, offsets, lanes=first.lanes)
