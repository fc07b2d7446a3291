"""Making a finding of a cost: its points, share and reasons, in one place."""

from drivetrain.diagnose.causes import CAUSES
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Confidence, Evidence, Finding, Kind, Remedy

__all__ = ["loss", "loss_beside_steps"]


def loss(
    facts: Facts,
    rule: str,
    cause: str,
    subject: str,
    cost_ns: float | None,
    *,
    evidence: tuple[Evidence, ...],
    why_unknown: str | None = None,
    text: str | None = None,
    kind: Kind = "loss",
    confidence: Confidence = "high",
    remedies: tuple[Remedy, ...] = (),
    no_remedy: str | None = None,
    part_of: str | None = None,
    class_name: str | None = None,
    points: float | None = None,
) -> Finding:
    """A finding whose cost is a part of the mean step.

    Args:
        why_unknown: given where `cost_ns` is None.
        text: what happens; None: what the cause means.
        no_remedy: None without remedies: the cause's advice.
        points: where they are not those of lost time.
        (the rest as in :class:`Finding`)
    """
    assert (cost_ns is None) == (why_unknown is not None), subject
    unknown = dict(facts.no_points)
    if cost_ns is None and why_unknown is not None:
        unknown = {"cost_ns": why_unknown, "points": why_unknown}
    elif points is None and cost_ns is not None:
        points = facts.points_of(cost_ns)
    return Finding(
        rule=rule,
        kind=kind,
        subject=subject,
        cause=cause,
        text=text or CAUSES[cause].meaning,
        cost_ns=cost_ns,
        points=points,
        share=None if cost_ns is None else facts.share_of(cost_ns),
        confidence=confidence,
        evidence=evidence,
        remedies=remedies,
        no_remedy=None if remedies else no_remedy or f"nothing in the catalogue: {CAUSES[cause].advice}",
        part_of=part_of,
        class_name=class_name,
        unknown=unknown,
    )


def loss_beside_steps(
    facts: Facts,
    rule: str,
    cause: str,
    subject: str,
    cost_ns: float,
    *,
    evidence: tuple[Evidence, ...],
    remedies: tuple[Remedy, ...] = (),
    class_name: str | None = None,
    part_of: str | None = None,
) -> Finding:
    """A finding whose cost lies between steps, spread over all of them: its share is of a step with it.

    Args:
        part_of: class of the account whose time it is; None: the window holds none of it.
        (the rest as in :func:`loss`)
    """
    whole = facts.mean.window_ns + (0.0 if part_of is not None else cost_ns)
    return Finding(
        rule=rule,
        kind="loss",
        subject=subject,
        cause=cause,
        text=CAUSES[cause].meaning,
        cost_ns=cost_ns,
        points=100 * cost_ns / whole if facts.has_points else None,
        share=cost_ns / whole,
        confidence="high",
        evidence=evidence,
        remedies=remedies,
        no_remedy=None if remedies else f"nothing in the catalogue: {CAUSES[cause].advice}",
        part_of=part_of,
        class_name=class_name,
        unknown=facts.no_points,
    )
