"""What a rule finds: one loss, its cost and evidence, and the catalogue's remedies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain.diagnose.causes import CAUSES

__all__ = ["Confidence", "Evidence", "Finding", "Kind", "Remedy"]

Kind = Literal["not_in_effect", "setting", "loss", "withheld"]
"""``not_in_effect``: something that was asked for shows no effect. ``setting``: a setting of the machine or of the run
that is known to cost time, how much nobody measured. ``loss``: time that a cause takes. ``withheld``: a figure that the
records do not support, so that nothing can be said of it."""

Confidence = Literal["high", "medium", "low"]
"""``high``: the records hold the time, or the fact, itself. ``medium``: computed from recorded times by the rule that
the documentation of the cause gives. ``low``: an upper bound, or an inference from names and shapes."""


@dataclass(frozen=True)
class Evidence:
    """One fact behind a finding."""

    text: str
    """What was seen, with its figures."""
    source: str
    """Where the figures are from: ``account``, ``health``, ``trace of rank 0``, ``optimisation record``."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The figures by name, each with its unit at the name's end (``wait_s``)."""
    names: tuple[str, ...] = ()
    """Kernels, operators or functions, as the trace has them."""
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    place: str | None = None
    """File and line: ``train.py:10``, or as the profiler gives it, ``train.py(10): step``."""

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "text": self.text,
            "source": self.source,
            "numbers": dict(self.numbers),
            "names": list(self.names),
            "ranks": list(self.ranks),
            "steps": list(self.steps),
            "place": self.place,
        }


@dataclass(frozen=True)
class Remedy:
    """An entry of the catalogue that treats the cause and is not requested, or another value of a setting."""

    name: str | None
    """The entry; None: a setting that no entry requests (the micro-batch, an interval)."""
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
    estimate: float | None = None
    """The same ratio as it is expected; None: nothing to compute it from."""
    estimate_rule: str | None = None
    """How it was computed; None without an estimate."""
    memory_bytes: int | None = None
    """Change of a device's peak memory; None: there is no model of it."""

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "optimisation": self.name,
            "field": self.field,
            "change": None if self.change is None else dict(self.change),
            "numerics": self.numerics,
            "bound": self.ratio,
            "bound_rule": None if self.ratio is None else "the whole cost of the finding disappears",
            "estimate": self.estimate,
            "estimate_rule": self.estimate_rule,
            "memory_bytes": self.memory_bytes,
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
    """Identifier, of :data:`drivetrain.diagnose.causes.CAUSES`."""
    text: str
    """What happens, in one sentence."""
    cost_ns: float | None = None
    """Of a step, mean over ranks (of the window where it has no steps). None: unknown, see `unknown`."""
    points: float | None = None
    """Cost in MFU points; None: unknown, see `unknown`."""
    share: float | None = None
    """Cost over the step's time; for a class whose loss is unknown, the class's own share."""
    confidence: Confidence = "high"
    evidence: tuple[Evidence, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    no_remedy: str | None = None
    """Why there is no remedy; None where there are some, or where the rule proposes none."""
    part_of: str | None = None
    """The subject of the finding, or the group of classes, whose cost includes this one's; costs of parts must not be
    added to it."""
    class_name: str | None = None
    """Class, or group of classes, of the account whose time it is; None: `part_of`, or no class."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Figure (``cost_ns``, ``points``) that is None → why."""

    def __post_init__(self) -> None:
        assert self.cause in CAUSES, f"{self.cause} is no documented cause"
        assert self.cost_ns is not None or "cost_ns" in self.unknown, self.subject
        assert self.points is not None or "points" in self.unknown, self.subject

    def to_document(self, position: int) -> dict[str, Any]:
        """Plain JSON.

        Args:
            position: place among the findings, from 1.
        """
        return {
            "position": position,
            "cause": self.cause,
            "class": self.class_name or self.part_of,
            "ms_per_step": None if self.cost_ns is None else self.cost_ns / 1e6,
            "ms_per_step_reason": None if self.cost_ns is not None else self.unknown["cost_ns"],
            "mfu_points": self.points,
            "mfu_points_reason": None if self.points is not None else self.unknown["points"],
            "confidence": self.confidence,
            "rule": self.rule,
            "kind": self.kind,
            "subject": self.subject,
            "text": self.text,
            "share": self.share,
            "part_of": self.part_of,
            "evidence": [one.to_document() for one in self.evidence],
            "remedies": [remedy.to_document() for remedy in self.remedies],
            "no_remedy": self.no_remedy,
        }
