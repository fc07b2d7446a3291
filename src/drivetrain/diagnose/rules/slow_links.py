"""Collectives whose bytes move slower than they do elsewhere, or at their own best."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    for verdict in facts.account.verdicts:
        cost = verdict.excess_transfer_ns_per_step
        if "slow_link" not in verdict.losses or cost is None:
            continue
        speeds = ""
        if verdict.bus_bandwidth is not None and verdict.reference_bandwidth is not None:
            against = "other groups" if verdict.reference == "other_groups" else "its own best"
            speeds = (
                f": {verdict.bus_bandwidth / 1e9:.2f} GB/s against {verdict.reference_bandwidth / 1e9:.2f} GB/s of "
                f"{against}"
            )
        who = ", ".join(map(str, verdict.ranks))
        yield Finding(
            rule="slow_links",
            kind="loss",
            subject=f"{verdict.group} {verdict.kind} of ranks {who}",
            cause="communication.slow_link",
            text="bytes move slower than they could",
            cost_ns=cost,
            points=facts.points_of(cost),
            share=facts.share_of(cost),
            evidence=(
                Evidence(
                    f"{verdict.occurrences} of them{speeds}", "account, across ranks", ranks=verdict.ranks
                ),
            ),
            no_remedy="no entry of the catalogue treats a slow link: look at the link between these ranks",
            part_of="communication",
            unknown=facts.no_points,
        )


RULE = Rule("slow_links", ("communication.slow_link",), ("several ranks",), _detect)
