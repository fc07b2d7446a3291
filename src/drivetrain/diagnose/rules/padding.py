"""Padding that is computed like tokens and carries no loss: no loss of MFU, but of effective MFU."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import remedies_against
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.figures is not None
    padding = facts.figures.padding
    if not padding:
        return
    # The update's work is in proportion to parameters, whatever the rows hold.
    computed = facts.group_ns("compute") - facts.group_ns("compute.optimizer") + facts.group_ns("recompute")
    cost = padding * computed
    drawn = facts.account.waterfall
    remedies, none, _ = remedies_against(facts, "data.padding", cost)
    yield loss(
        facts,
        "padding",
        "data.padding",
        "padding",
        cost,
        confidence="medium",
        evidence=(
            Evidence(
                f"{padding:.1%} of the processed tokens are padding; MFU counts them as work, the points are of "
                "effective MFU",
                "events of the run",
                {"padding_share": padding},
            ),
        ),
        remedies=remedies,
        no_remedy=none,
        part_of="compute",
        points=drawn.mfu * padding if drawn is not None and drawn.mfu is not None else None,
    )


RULE = Rule("padding", ("data.padding",), ("run",), _detect)
