"""Gradients that travel when everything is computed: hardly any communication lies beside computation.

For traces, and for runs that do not say themselves what was waited for (those are ``overlap_advice``'s).
"""

import statistics
from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import remedies_against
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]

_MOST_HIDDEN = 0.1
"""Overlap ratio below which communication is serial."""
_ROOM = 0.5
"""Part of computation under which gradients can travel: backward is two thirds of it, and its first layers have no
gradient yet."""
_GROUPS = ("dp", "world", "unknown")


def _detect(facts: Facts) -> Iterator[Finding]:
    known = facts.communication
    if known is not None and facts.config is not None and known.get("exposed_s") is not None:
        return
    of_ranks = [
        [step.window for step in rank.steady_steps] if facts.mean.is_step else [rank.whole]
        for rank in facts.account.ranks
    ]
    if any(
        one.communication_ns is None or one.overlapped_communication_ns is None
        for windows in of_ranks
        for one in windows
    ):
        return  # Withheld, with its reason among the health findings.
    under_way, hidden = (
        statistics.fmean(statistics.fmean(getattr(one, name) for one in windows) for windows in of_ranks)
        for name in ("communication_ns", "overlapped_communication_ns")
    )
    moved, whole = (
        sum(
            facts.mean.classes.get(f"communication.{group}.{part}", 0.0)
            for group in _GROUPS
            for part in parts
        )
        for parts in (("transfer",), ("transfer", "unsplit"))
    )
    if not under_way or not whole:
        return
    # Collectives of other groups may have nothing to hide under. If all that is hidden were gradients, this share of
    # them would be: below the limit they are serial whosever it is.
    if hidden >= _MOST_HIDDEN * (hidden + whole):
        return
    cost = min(whole, _ROOM * facts.group_ns("compute"))
    remedies, none, _ = remedies_against(facts, "communication.serial", cost)
    yield loss(
        facts,
        "serial_communication",
        "communication.serial",
        "communication of gradients",
        cost,
        # What is not split into waiting and transfer may be a rank that is late.
        confidence="medium" if moved >= 0.5 * whole else "low",
        evidence=(
            Evidence(
                f"{hidden / under_way:.1%} of the time in which collectives are under way lies beside computation; "
                f"{whole / 1e6:.3f} ms a step move bytes with nothing beside",
                "account",
                {"overlap_share": hidden / under_way, "exposed_ms": whole / 1e6},
            ),
        ),
        remedies=remedies,
        no_remedy=none,
        part_of="communication",
    )


RULE = Rule("serial_communication", ("communication.serial",), (), _detect)
