"""All rules applied to one job: findings, the largest first, and what was too small to be claimed."""

from dataclasses import dataclass
from typing import Any

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Finding, Kind
from drivetrain.diagnose.rule import rules

__all__ = ["LEAST_SHARE", "Diagnosis", "diagnose"]

LEAST_SHARE = 0.01
"""Share of a step below which a loss is not claimed: less is within the noise of most machines."""

_ORDER: tuple[Kind, ...] = ("not_in_effect", "loss", "withheld")


@dataclass(frozen=True)
class Diagnosis:
    """The answer."""

    subject: str
    window: str
    """Which steps of which ranks, in words."""
    mean_ns: float
    """Length of the mean step, or of the mean window where there are no steps."""
    is_step: bool
    mfu: float | None
    mfu_reason: str | None
    """Why there is no MFU, or why two losses are one bar."""
    findings: tuple[Finding, ...]
    """What is not in effect, then losses with the largest first, then what the records do not support."""
    small: tuple[Finding, ...]
    """Losses below :data:`LEAST_SHARE`: counted, not claimed."""

    def of(self, kind: Kind) -> tuple[Finding, ...]:
        """The findings of one kind, in order."""
        return tuple(finding for finding in self.findings if finding.kind == kind)

    @property
    def worst(self) -> Finding | None:
        """The loss with the most MFU points, claimed or not; None where no loss has points."""
        losses = [finding for finding in (*self.of("loss"), *self.small) if finding.points is not None]
        return max(losses, key=lambda finding: finding.points or 0.0, default=None)

    @property
    def worst_points(self) -> float | None:
        """MFU points of the largest loss, claimed or not; 0 where no loss was found, None where points are unknown."""
        if self.mfu is None:
            return None
        worst = self.worst
        return 0.0 if worst is None else worst.points

    def to_document(self) -> dict[str, Any]:
        """What ``drivetrain diagnose --json`` prints."""
        return {
            "schema": 1,
            "subject": self.subject,
            "window": self.window,
            "mean_ns": self.mean_ns,
            "is_step": self.is_step,
            "mfu": self.mfu,
            "mfu_reason": self.mfu_reason,
            "least_share": LEAST_SHARE,
            "findings": [finding.to_document() for finding in self.findings],
            "below_least_share": [
                {"subject": finding.subject, "share": finding.share} for finding in self.small
            ],
        }


def diagnose(facts: Facts) -> Diagnosis:
    """Apply every rule."""
    drawn = facts.account.waterfall
    found = [finding for rule in rules() for finding in rule.detect(facts)]
    small = [finding for finding in found if finding.kind == "loss" and (finding.share or 0.0) < LEAST_SHARE]
    kept = [finding for finding in found if finding not in small]
    return Diagnosis(
        subject=facts.subject,
        window="" if drawn is None else drawn.window,
        mean_ns=facts.mean.window_ns,
        is_step=facts.mean.is_step,
        mfu=None if drawn is None else drawn.mfu,
        mfu_reason=facts.no_points.get("points") if drawn is None else drawn.reason,
        findings=tuple(sorted(kept, key=_rank)),
        small=tuple(sorted(small, key=_rank)),
    )


def _rank(finding: Finding) -> tuple[int, bool, float, str]:
    """Kinds in their order; within one, known costs before unknown ones, the largest first."""
    return (
        _ORDER.index(finding.kind),
        finding.cost_ns is None,
        -(finding.cost_ns if finding.cost_ns is not None else finding.share or 0.0),
        finding.subject,
    )
