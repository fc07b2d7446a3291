"""What a rule finds: one loss, its cost and evidence, and the catalogue's remedies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Evidence", "Finding", "Kind", "Remedy"]

Kind = Literal["not_in_effect", "loss", "withheld"]
"""``not_in_effect``: something that was asked for shows no effect. ``loss``: time that a cause takes. ``withheld``: a
figure that the records do not support, so that nothing can be said of it."""


@dataclass(frozen=True)
class Evidence:
    """One fact behind a finding."""

    text: str
    """What was seen, with its figures."""
    source: str
    """Where the figures are from: ``account``, ``health``, ``trace of rank 0``, ``optimisation record``."""


@dataclass(frozen=True)
class Remedy:
    """An entry of the catalogue that treats the cause and is not requested."""

    name: str
    field: str
    change: Mapping[str, Any] | None
    """Leaf → value of the move; None where the configuration is not known."""
    numerics: str
    """The gate it must pass."""
    ratio: float | None
    """Step time before over after if the whole cost disappeared: no gain can be larger, and most are smaller. None: the
    cost is unknown, or is the whole step."""
    note: str | None = None
    """What else is to be known of it."""

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "name": self.name,
            "field": self.field,
            "change": None if self.change is None else dict(self.change),
            "numerics": self.numerics,
            "upper_bound": None
            if self.ratio is None
            else {"ratio": self.ratio, "rule": "the whole cost of the finding disappears"},
            "note": self.note,
        }


@dataclass(frozen=True)
class Finding:
    """One cause."""

    rule: str
    """Name of the rule that found it."""
    kind: Kind
    subject: str
    """What it is about: a class of the account, an optimisation, a rank, a line of code."""
    cause: str
    """In one sentence."""
    cost_ns: float | None = None
    """Of a step, mean over ranks (of the window where it has no steps). None: unknown, see `unknown`."""
    points: float | None = None
    """Cost in MFU points; None: unknown, see `unknown`."""
    share: float | None = None
    """Cost over the step's time; for a class whose loss is unknown, the class's own share."""
    evidence: tuple[Evidence, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    no_remedy: str | None = None
    """Why there is no remedy; None where there are some, or where the rule proposes none."""
    part_of: str | None = None
    """The subject of the finding whose cost includes this one's; costs of parts must not be added to it."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Figure (``cost_ns``, ``points``) that is None → why."""

    def __post_init__(self) -> None:
        assert self.cost_ns is not None or "cost_ns" in self.unknown, self.subject
        assert self.points is not None or "points" in self.unknown, self.subject

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "rule": self.rule,
            "kind": self.kind,
            "subject": self.subject,
            "cause": self.cause,
            "cost_ns": self.cost_ns,
            "cost_reason": self.unknown.get("cost_ns"),
            "points": self.points,
            "points_reason": self.unknown.get("points"),
            "share": self.share,
            "part_of": self.part_of,
            "evidence": [{"text": one.text, "source": one.source} for one in self.evidence],
            "remedies": [remedy.to_document() for remedy in self.remedies],
            "no_remedy": self.no_remedy,
        }
