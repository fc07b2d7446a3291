"""The convergence gate: does a changed run train as its baseline does? Decisions from plain numbers, no files.

Three tiers, by what the change claims of the numbers (:data:`drivetrain.catalogue.Numerics`), each in a file of its
own: ``gate_exact``, ``gate_roundoff``, ``gate_statistical``. Here is what they share: the evidence of a run, and what
is refused or decided before any number is compared. ``docs/gate.md`` states the rules with their error rates.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "TIERS",
    "Answer",
    "End",
    "Evidence",
    "Leak",
    "Point",
    "Tier",
    "Verdict",
    "refusal",
    "with_leak_probe",
]

Tier = Literal["exact", "round-off", "statistical"]
TIERS: tuple[Tier, ...] = ("exact", "round-off", "statistical")
"""From the cheapest gate to the strictest."""
Answer = Literal["pass", "fail", "suspicious", "inconclusive", "not comparable"]
End = Literal["finished", "diverged", "failed", "unfinished"]


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


@dataclass(frozen=True)
class Point:
    """One optimizer step: tokens consumed with it, nats per token (None: no token carried loss), gradient norm."""

    tokens: int
    loss: float | None
    grad_norm: float


@dataclass(frozen=True)
class Leak:
    """What the leak probe of a run said: ``clean``, ``leak`` or ``not applicable``, and why."""

    verdict: str
    why: str


@dataclass(frozen=True)
class Evidence:
    """Everything the gate knows of one run.

    Attributes:
        name: for messages.
        end: how it ended; ``unfinished`` while it runs, or where nobody knows.
        reason: of an end that is not ``finished``.
        points: each step, in order.
        environment: what must agree for numbers to be comparable; plain text by name.
        dataset: fingerprint of the corpus; None where unknown.
        seed, data_seed: of initial weights and dropout, and of the data order.
        deterministic: ``run.deterministic``.
        epsilon: of the compute dtype (2**-7 for bf16).
        leak: None where the run was not probed.
        gradients: of step 1, fp32, by parameter name; None where the run was not probed. Called when needed.
        held_out: loss on held-out text after the last step, nats per token.
        held_out_tokens: that were evaluated.
    """

    name: str
    end: End
    reason: str
    points: tuple[Point, ...]
    environment: Mapping[str, str]
    dataset: str | None
    seed: int
    data_seed: int
    deterministic: bool
    epsilon: float
    leak: Leak | None = None
    gradients: Callable[[], Mapping[str, NDArray[np.float32]]] | None = None
    held_out: float | None = None
    held_out_tokens: int | None = None


def refusal(tier: Tier, baseline: Evidence, candidate: Evidence) -> Verdict | None:
    """What is decided before numbers are compared; None where they are to be compared.

    A candidate that diverged, failed or leaks fails; a baseline that did, or runs of another environment or data, are
    nothing to compare with.
    """

    def incomparable(why: str) -> Verdict:
        return Verdict(tier, "not comparable", why)

    if baseline.dataset is None or baseline.dataset != candidate.dataset:
        return incomparable(
            f"{baseline.name} and {candidate.name} were trained on other data (fingerprints "
            f"{_short(baseline.dataset)} and {_short(candidate.dataset)})"
        )
    difference = other_environment(baseline, candidate)
    if difference is not None:
        return incomparable(difference)
    if baseline.end != "finished":
        return incomparable(f"the baseline {baseline.name} {_ended(baseline)}")
    if candidate.end == "unfinished":
        return incomparable(f"the candidate {candidate.name} {_ended(candidate)}")
    if candidate.end != "finished":
        return Verdict(tier, "fail", f"the candidate {candidate.name} {_ended(candidate)}")
    if baseline.leak is not None and baseline.leak.verdict == "leak":
        return incomparable(f"the baseline {baseline.name} leaks: {baseline.leak.why}")
    if candidate.leak is not None and candidate.leak.verdict == "leak":
        return Verdict(tier, "fail", f"the candidate leaks: {candidate.leak.why}")
    return None


def other_environment(one: Evidence, other: Evidence) -> str | None:
    """Why two runs were not made in the same environment; None where they were."""
    keys = dict.fromkeys((*one.environment, *other.environment))
    differing = [key for key in keys if one.environment.get(key) != other.environment.get(key)]
    if not differing:
        return None
    parts = [f"{key} {one.environment.get(key)} and {other.environment.get(key)}" for key in differing]
    return (
        f"{one.name} and {other.name} ran in different environments ({'; '.join(parts)}): make the runs again in one "
        "environment"
    )


def with_leak_probe(verdict: Verdict, runs: Iterable[Evidence]) -> Verdict:
    """``verdict``; a pass only if the leak probe found each of ``runs`` clean."""
    if not verdict.passed:
        return verdict
    for run in runs:
        if run.leak is None:
            why = f"{run.name} has no leak probe (train it with --probe); otherwise: {verdict.why}"
        elif run.leak.verdict != "clean":
            why = f"the leak probe of {run.name} says nothing: {run.leak.why}; otherwise: {verdict.why}"
        else:
            continue
        return replace(verdict, verdict="inconclusive", why=why)
    return verdict


def _ended(run: Evidence) -> str:
    word = {"diverged": "diverged", "failed": "failed", "unfinished": "is not finished"}[run.end]
    return f"{word}: {run.reason}" if run.reason else word


def _short(fingerprint: str | None) -> str:
    return "unknown" if fingerprint is None else fingerprint[:12]
