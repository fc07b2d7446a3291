"""Evaluations at so short an interval that training stands still for them more than it should."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Finding
from drivetrain.diagnose.interruptions import too_often
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]

_CAUSE = "maintenance.evaluation_too_often"
_MOST = 0.02
"""Share of a run that they may take; a choice: more than of checkpoints, since it tells how training goes."""


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.config is not None
    yield from too_often(
        facts,
        "frequent_evaluations",
        _CAUSE,
        kind="evaluation",
        leaf="training.eval_interval",
        interval=facts.config.training.eval_interval,
        most=_MOST,
    )


RULE = Rule("frequent_evaluations", (_CAUSE,), ("configuration", "logged steps"), _detect)
