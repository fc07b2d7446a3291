"""Groups of ranks between which bytes move slower than between others, by what the ranks of a run wrote themselves.

Traces of gloo name no group, so that where there are several the account can compare none; the files of the ranks
(``monitor.log_rank_times``) do. Compared are collectives of one dimension, kind and payload among as many ranks. They
begin when the last rank has come, so that no lateness is in them.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.rule import Rule
from drivetrain.measure.collective_waits import Matched

__all__ = ["RULE"]

_CAUSE = "communication.slow_link"
_LEAST = 8
"""Collectives of one payload below which a group tells nothing."""
_SLOWER = 1.5
"""Median transfer over that of the others above which a group is slow, if the quartiles do not overlap either; as the
account has it of traces."""

_Ranks = tuple[int, ...]


@dataclass(frozen=True)
class _Slow:
    """A group that is slow with one payload.

    Attributes:
        group, kind, bytes, ranks: which.
        median_ns, reference_ns: of its transfers, and of the others'.
        excess_ns: by rank, what its training thread waited in them longer than those of the others, a step.
    """

    group: str
    kind: str
    bytes: int
    ranks: _Ranks
    median_ns: float
    reference_ns: float
    excess_ns: Mapping[int, float]


def _detect(facts: Facts) -> Iterator[Finding]:
    known = facts.collectives
    assert known is not None
    slow = _slow_groups(known.matched, known.steps)
    if not slow:
        return
    excess: dict[int, float] = defaultdict(float)
    for one in slow:
        for rank, ns in one.excess_ns.items():
            excess[rank] += ns
    # What one rank waits for comes on top of each other; ranks wait side by side.
    cost = max(excess.values())
    if cost <= 0:
        return
    shared = sorted(set.intersection(*(set(one.ranks) for one in slow)))
    if len(slow) > 1 and len({one.ranks for one in slow}) > 1 and len(shared) == 1:
        subject = f"link of rank {shared[0]}"
    else:
        subject = "links between ranks " + " and ".join(
            ", ".join(map(str, ranks)) for ranks in sorted({one.ranks for one in slow})
        )
    yield loss(
        facts,
        "slow_groups",
        _CAUSE,
        subject,
        cost,
        confidence="medium",
        evidence=tuple(
            Evidence(
                f"{one.group} {one.kind} of {one.bytes / 1e6:.3g} MB between ranks {', '.join(map(str, one.ranks))} "
                f"takes {one.median_ns / 1e6:.3f} ms, between others {one.reference_ns / 1e6:.3f} ms",
                f"collectives of {known.steps} steps without the profiler, as all ranks wrote them",
                {"transfer_ms": one.median_ns / 1e6, "reference_ms": one.reference_ns / 1e6},
                ranks=one.ranks,
            )
            for one in slow
        ),
        part_of="communication",
    )


def _slow_groups(matched: Sequence[Matched], steps: int) -> list[_Slow]:
    alike: dict[tuple[str, str, int, int], dict[_Ranks, list[Matched]]] = {}
    for one in matched:
        if one.bytes:
            key = one.group, one.kind, len(one.ranks), one.bytes
            alike.setdefault(key, {}).setdefault(one.ranks, []).append(one)
    found = []
    for (group, kind, _, size), by_ranks in alike.items():
        enough = {ranks: ones for ranks, ones in by_ranks.items() if len(ones) >= _LEAST}
        for ranks, mine in enough.items():
            others = [one for other, ones in enough.items() if other != ranks for one in ones]
            if not others:
                continue
            taken, theirs = (
                np.array([min(one.transfer_ns.values()) for one in ones], np.float64)
                for ones in (mine, others)
            )
            median, reference = float(np.median(taken)), float(np.median(theirs))
            if median < _SLOWER * reference or np.quantile(taken, 0.25) <= np.quantile(theirs, 0.75):
                continue
            usual = statistics.fmean(statistics.fmean(one.exposed_ns.values()) for one in others)
            excess = {
                rank: (sum(one.exposed_ns[rank] for one in mine) - usual * len(mine)) / steps
                for rank in ranks
            }
            found.append(_Slow(group, kind, size, ranks, median, reference, excess))
    return found


RULE = Rule("slow_groups", (_CAUSE,), ("collectives of ranks",), _detect)
