"""The convergence gate: does a changed run train as its baseline does? Decisions from plain numbers, no files.

Three tiers, by what the change claims of the numbers (:data:`drivetrain.catalogue.Numerics`). ``docs/gate.md``
states each rule with its error rates; :mod:`drivetrain.tune.gate_runs` reads the numbers from runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Answer", "Tier", "Verdict"]

Tier = Literal["exact", "round-off", "statistical"]
Answer = Literal["pass", "fail", "suspicious", "inconclusive", "not comparable"]


@dataclass(frozen=True)
class Verdict:
    """What the gate says of one change.

    Attributes:
        tier: by which rule; None where none could be chosen.
        verdict: ``pass`` alone lets a change through.
        why: the reason in words, with the number that decided.
        numbers: every number that was compared, with its limit.
    """

    tier: Tier | None
    verdict: Answer
    why: str
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the change may be kept."""
        return self.verdict == "pass"

    def to_document(self) -> dict[str, Any]:
        """``{"tier", "verdict", "why", "numbers"}``."""
        return {
            "tier": self.tier,
            "verdict": self.verdict,
            "why": self.why,
            "numbers": dict(self.numbers),
        }
