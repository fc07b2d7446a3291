"""All rules applied to one job: findings, the largest first, and what was too small to be claimed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Finding, Kind
from drivetrain.diagnose.published import Nearest, nearest_published
from drivetrain.diagnose.rule import rules
from drivetrain.measure.account import HealthFinding

__all__ = ["EXPLAINS", "LEAST_SHARE", "Diagnosis", "NotAsked", "diagnose"]

LEAST_SHARE = 0.01
"""Share of a step below which a loss is not claimed: less is within the noise of most machines."""

_ORDER: tuple[Kind, ...] = ("not_in_effect", "setting", "loss", "withheld")
EXPLAINS = 0.5
"""Part of a class's cost from which a finding that is part of it stands before it: it is the more telling one."""
_GENERAL = frozenset({"communication.too_much"})
"""Causes that say that a time is long, and not why: what explains half of it stands before them, as before a class."""


@dataclass(frozen=True)
class NotAsked:
    """A rule for which facts are missing."""

    rule: str
    causes: tuple[str, ...]
    reason: str


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
    health: tuple[HealthFinding, ...]
    """What is wrong with the records, as the account has it."""
    findings: tuple[Finding, ...]
    """What is not in effect, settings that cost time, then losses with the largest first, then what the records do not
    support."""
    small: tuple[Finding, ...]
    """Losses below :data:`LEAST_SHARE`: counted, not claimed."""
    not_asked: tuple[NotAsked, ...]
    """Rules that nothing can be said of."""
    communication_share: float
    """Exposed communication over the mean step, waiting counted in."""
    nearest: Nearest
    """The published run that is nearest."""

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
            "schema": 2,
            "health": [finding.to_document() for finding in self.health],
            "subject": self.subject,
            "window": self.window,
            "mean_ns": self.mean_ns,
            "is_step": self.is_step,
            "mfu": self.mfu,
            "mfu_reason": self.mfu_reason,
            "least_share": LEAST_SHARE,
            "communication_share": self.communication_share,
            "findings": [
                finding.to_document(position) for position, finding in enumerate(self.findings, start=1)
            ],
            "below_least_share": [
                {"cause": finding.cause, "subject": finding.subject, "share": finding.share}
                for finding in self.small
            ],
            "nearest_published": self.nearest.to_document(),
            "not_asked": [
                {"rule": one.rule, "causes": list(one.causes), "reason": one.reason} for one in self.not_asked
            ],
        }


def diagnose(facts: Facts) -> Diagnosis:
    """Apply every rule."""
    drawn = facts.account.waterfall
    not_asked: list[NotAsked] = []
    found: list[Finding] = []
    for rule in rules():
        missing = rule.missing(facts)
        if missing is not None:
            not_asked.append(NotAsked(rule.name, rule.causes, missing))
            continue
        found += rule.detect(facts)
    # A loss of unknown cost has no share either: nobody can say that it is small.
    small = [
        finding
        for finding in found
        if finding.kind == "loss" and finding.share is not None and finding.share < LEAST_SHARE
    ]
    kept = [finding for finding in found if finding not in small]
    return Diagnosis(
        subject=facts.subject,
        window="" if drawn is None else drawn.window,
        mean_ns=facts.mean.window_ns,
        is_step=facts.mean.is_step,
        mfu=None if drawn is None else drawn.mfu,
        mfu_reason=facts.no_points.get("points") if drawn is None else drawn.reason,
        health=tuple(facts.account.health),
        findings=_ranked(kept),
        small=_ranked(small),
        not_asked=tuple(not_asked),
        communication_share=facts.share_of(facts.group_ns("communication")),
        nearest=nearest_published(facts),
    )


def _ranked(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Kinds in their order; within one, known costs before unknown ones, the largest first. What explains most of a
    class, or of a finding that is no cause yet, stands right before it: it says more, and costs as much."""
    wholes = [
        (finding.part_of or finding.subject, finding.cost_ns)
        for finding in findings
        if finding.cost_ns is not None and (finding.part_of is None or finding.cause in _GENERAL)
    ]

    def weight(finding: Finding) -> float:
        cost = finding.cost_ns if finding.cost_ns is not None else finding.share or 0.0
        if finding.part_of is None or finding.cost_ns is None:
            return cost
        explained = [
            whole
            for place, whole in wholes
            if _one_in_the_other(place, finding.part_of) and finding.cost_ns >= EXPLAINS * whole
        ]
        return max([cost, *explained])

    return tuple(
        sorted(
            findings,
            key=lambda one: (
                _ORDER.index(one.kind),
                one.cost_ns is None,
                -weight(one),
                one.part_of is None,
                one.cause in _GENERAL,
                -(one.cost_ns or 0.0),
                one.subject,
            ),
        )
    )


def _one_in_the_other(one: str, other: str) -> bool:
    """Whether a class or group of the account holds the other, or is it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
