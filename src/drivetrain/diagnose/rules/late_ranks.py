"""Ranks that arrive last at collectives, and what waiting for them costs the others."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    waiting = [
        name for name in facts.mean.classes if name.startswith("communication.") and name.endswith(".wait")
    ]
    for straggler in facts.account.stragglers:
        cost = straggler.cost_ns_per_step
        evidence = [
            Evidence(
                f"last at {straggler.times_last} of {straggler.collectives} matched collectives; cost as a mean over "
                "the other ranks and all recorded steps",
                "account, across ranks",
                {"times_last": straggler.times_last, "collectives": straggler.collectives},
                ranks=(straggler.rank,),
            )
        ]
        for verdict in facts.account.verdicts:
            if verdict.late_rank == straggler.rank and verdict.losses:
                words = ", ".join(loss.replace("_", " ") for loss in verdict.losses)
                evidence.append(
                    Evidence(f"{words} in {verdict.kind} of group {verdict.group}", "account, across ranks")
                )
        yield Finding(
            rule="late_ranks",
            kind="loss",
            subject=f"rank {straggler.rank}",
            cause=_cause(facts, straggler.rank),
            text="the other ranks wait for it",
            cost_ns=cost,
            points=facts.points_of(cost),
            share=facts.share_of(cost),
            evidence=tuple(evidence),
            no_remedy="no entry of the catalogue treats a late rank: look at that rank's own account",
            part_of=waiting[0] if len(waiting) == 1 else "communication",
            unknown=facts.no_points,
        )


def _cause(facts: Facts, rank: int) -> str:
    """A rank that computes longer is slow; one that does not, or of which nobody knows, is late."""
    slow = any(
        verdict.late_rank == rank and "slow_rank" in verdict.losses for verdict in facts.account.verdicts
    )
    return "communication.slow_rank" if slow else "communication.late_rank"


RULE = Rule("late_ranks", ("communication.slow_rank", "communication.late_rank"), ("several ranks",), _detect)
