"""Checkpoints at so short an interval that training stands still for them more than it should."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Finding
from drivetrain.diagnose.interruptions import too_often
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]

_CAUSE = "maintenance.checkpoint_too_often"
_MOST = 0.01
"""Share of a run that they may take; less is not claimed of any loss."""


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.config is not None
    yield from too_often(
        facts,
        "frequent_checkpoints",
        _CAUSE,
        kind="checkpoint",
        leaf="checkpoint.save_interval",
        interval=facts.config.checkpoint.save_interval,
        most=_MOST,
    )


RULE = Rule("frequent_checkpoints", (_CAUSE,), ("configuration", "logged steps"), _detect)
