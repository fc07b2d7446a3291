"""Plain records of what an optimisation did: observations of a profiled window, evidence, prediction, record.

They pass from the readers of traces to the catalogue's entries, and from there into the run directory; nothing here
knows any optimisation by name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain.config.fusion import AUTO
from drivetrain.config.serialise import value_text

__all__ = [
    "Count",
    "Evidence",
    "EvidenceKind",
    "HostMemory",
    "NoPrediction",
    "Observation",
    "OptimisationRecord",
    "Prediction",
]

EvidenceKind = Literal["shown", "absent", "unknown"]


@dataclass(frozen=True)
class Count:
    """How often something was recorded, and the sum of its durations in ns (not a union: two at once count twice)."""

    calls: int
    ns: int


@dataclass(frozen=True)
class HostMemory:
    """How the allocator of host memory treats what is freed, seen at a profiled window."""

    keeps_freed: bool | None
    """Whether a large freed block stays with the process; None: not known."""
    reason: str | None = None
    """Why it is not known."""
    page_faults_per_step: float | None = None
    """Minor page faults of the process in a step without the profiler, before the window; None: not counted."""


@dataclass(frozen=True)
class Observation:
    """What the records of one rank's profiled steps show of *how* the work was done.

    Names are as in the trace. Keys of ``matmul_dtypes`` are ``bf16 fp16 fp32 fp64 fp8 tf32 int8 unknown``; of
    ``attention`` the implementation, ``flash efficient cudnn flex math eager unknown``. A mapping is empty where the
    trace has no such records; ``missing`` names the kinds of record that were not made, so that "not seen" is not
    taken for "not there".
    """

    num_steps: int
    operators: Mapping[str, Count] = field(default_factory=dict)
    """Host operators (``aten::mm``), Python functions left out."""
    kernels: Mapping[str, Count] = field(default_factory=dict)
    """Device kernels."""
    ranges: Mapping[str, Count] = field(default_factory=dict)
    """User annotations: spans of the loop, ``enumerate(DataLoader)#…``, ``Torch-Compiled Region``."""
    matmul_dtypes: Mapping[str, Count] = field(default_factory=dict)
    attention: Mapping[str, Count] = field(default_factory=dict)
    collective_bytes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Kind of collective (``all_reduce``) → payload of each call in bytes, in order of time; calls of unknown payload
    are left out."""
    missing: frozenset[str] = frozenset()
    """Of ``operators kernels ranges shapes collectives``."""
    host_memory: HostMemory | None = None
    """None where the trace does not tell: it is not of a run on a CPU, or of another trainer."""


@dataclass(frozen=True)
class Evidence:
    """Whether the records of a run show that an optimisation was in effect, and by what."""

    kind: EvidenceKind
    why: str


@dataclass(frozen=True)
class Prediction:
    """What a change is expected to bring."""

    ratio: float
    """Step time before over step time after; above 1 is faster."""
    rule: str
    """How it was computed."""
    memory_bytes: int | None = None
    """Change of the peak; None: not predicted."""
    low: float | None = None
    """The ratio at the unfavourable end of what the model leaves open; None: its model has no range."""
    high: float | None = None
    """The ratio at the favourable end."""
    of: Literal["tokens_per_second", "effective_tokens"] = "tokens_per_second"
    """What becomes more by it: tokens processed, or those that carry loss."""

    def __post_init__(self) -> None:
        assert (self.low is None) == (self.high is None)
        assert 0 < (self.ratio if self.low is None else self.low) <= self.ratio
        assert self.high is None or self.ratio <= self.high


@dataclass(frozen=True)
class NoPrediction:
    """That nothing is expected of a change, because nothing honest can be."""

    why: str
    """What is missing, in words: a fact, a measurement, or a model."""


@dataclass(frozen=True)
class OptimisationRecord:
    """One optimisation in one run: what was asked for, what became of it, and what proves it.

    Attributes:
        name: of the catalogue's entry.
        field: the configuration leaf that requests it.
        value: that leaf's value.
        requested: whether the value asks for it; a default that can have no effect in this run does not.
        active: whether the engine has put it into effect.
        reason: why it is not active although requested, or what is to be known of it; None otherwise.
        evidence: None until a window was profiled.
        served: calls by backend, of an operator; empty until steps were trained.
    """

    name: str
    field: str
    value: Any
    requested: bool
    active: bool
    reason: str | None = None
    evidence: Evidence | None = None
    served: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def without_effect(self) -> bool:
        """Asked for, and either not put into effect or contradicted by the records."""
        refuted = self.evidence is not None and self.evidence.kind == "absent"
        return self.requested and (not self.active or refuted)

    @property
    def served_otherwise(self) -> dict[str, int]:
        """Calls of an operator by other backends than the one that was asked for by name; empty where none was."""
        if self.value == AUTO:
            return {}
        return {backend: calls for backend, calls in self.served.items() if backend != self.value}

    @property
    def asked(self) -> str:
        """What was asked for, ``field = value``."""
        return f"{self.field} = {value_text(self.value)}"

    def to_document(self) -> dict[str, Any]:
        """The record as events, summaries and ``train --json`` hold it."""
        return {
            "name": self.name,
            "field": self.field,
            "value": self.value,
            "requested": self.requested,
            "active": self.active,
            "reason": self.reason,
            "evidence": None if self.evidence is None else self.evidence.kind,
            "evidence_why": None if self.evidence is None else self.evidence.why,
            "served": dict(self.served),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "OptimisationRecord":
        """The record that :meth:`to_document` wrote; KeyError where it is none."""
        kind = document["evidence"]
        return cls(
            name=document["name"],
            field=document["field"],
            value=document["value"],
            requested=document["requested"],
            active=document["active"],
            reason=document["reason"],
            evidence=None if kind is None else Evidence(kind, document["evidence_why"]),
            served=document.get("served", {}),
        )
