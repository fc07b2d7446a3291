"""Of the time that a run's own figures call waiting for collectives, the part in which bytes moved.

The rest is waiting for a rank that has not come yet, which no other size, dtype or number of pieces makes shorter.
"""

import statistics

from drivetrain.diagnose.facts import Facts

__all__ = ["moved_s"]

_LABELS = {"dp_shard": "dp", "dp_replicate": "dp"}
"""Dimension of the mesh → what the account calls it."""
_NAMELESS = ("world", "unknown")
"""Labels of the account for groups that a trace does not name."""


def moved_s(facts: Facts, group: str, kind: str, exposed_s: float) -> float:
    """Seconds of a step in which rank 0 stood waiting while bytes moved.

    Known where all ranks wrote these collectives, or where the account has the traces of several ranks, rank 0's
    among them; else all of it.

    Args:
        group, kind: of the collectives, as the run's summary names them.
        exposed_s: for which rank 0 stood waiting for them.
    """
    known = facts.collectives
    if known is not None and known.steps:
        own = [one.exposed_ns.get(0, 0) for one in known.matched if one.group == group and one.kind == kind]
        # None of them: queues that ranks could not tell apart are not matched, which says nothing about their bytes.
        if own:
            return min(exposed_s, sum(own) / 1e9 / known.steps)
    first = next((rank for rank in facts.account.ranks if rank.rank == 0), None)
    if first is None or not first.steps:
        return exposed_s
    labels = (_LABELS.get(group, group), *_NAMELESS)
    parts = {
        part: statistics.fmean(
            sum(step.window.classes.get(f"communication.{label}.{part}", 0) for label in labels)
            for step in first.steady_steps
        )
        for part in ("wait", "transfer", "unsplit")
    }
    whole = sum(parts.values())
    return exposed_s if not whole else exposed_s * (1 - parts["wait"] / whole)
