"""Health findings that make a figure untrustworthy, so that a diagnosis is silent about it."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    for finding in facts.account.health:
        if not finding.affects and finding.severity != "error":
            continue
        affected = ", ".join(finding.affects)
        yield Finding(
            rule="withheld_figures",
            kind="withheld",
            subject=finding.id,
            cause="records.withheld",
            text=finding.message,
            evidence=(
                Evidence(f"withheld: {affected}" if affected else "an error in the figures", "health"),
            ),
            unknown={
                "cost_ns": "a figure that is withheld has no cost",
                "points": "a figure that is withheld has no cost",
            },
        )


RULE = Rule("withheld_figures", ("records.withheld",), (), _detect)
