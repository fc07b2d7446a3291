"""The round-off tier: a change that rounds otherwise stays where runs of almost the same weights stay.

The envelope is made by the baseline itself, started again from weights that were moved by one unit in the last place
of the compute dtype. Round-off that a different kernel brings is of that size, and training amplifies both alike.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.measure.statistics import percentile
from drivetrain.tune.gate import Evidence, Verdict, other_environment, refusal, with_leak_probe

__all__ = ["FACTOR", "LEAST_PERTURBATIONS", "LEAST_STEPS", "round_off_gate"]

FACTOR = 3.0
"""Differences up to so many times the envelope count as round-off."""
SHARE = 0.95
LEAST_PERTURBATIONS = 3
LEAST_STEPS = 20
LAST_SHARE = 0.2
NEIGHBOURS = 10
NEIGHBOUR_SHARE = 0.1
"""The envelope at a step is made of the steps around it, so many or this share of the run on either side: runs drift
apart by orders of magnitude as they go, and one envelope for all steps would let anything through in the early ones."""
GRADIENT_EPSILONS = 2.0
"""Relative error of a gradient, in epsilons of the compute dtype, that is always allowed: a handful of roundings on
the way back. It is the floor where three perturbations happen to hit a parameter hardly at all."""
_FP32_EPSILON = 2.0**-23
"""Losses and norms are summed in fp32 whatever the compute dtype is."""

_Gradients = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class _Finding:
    """One comparison: its key and numbers in the verdict, and what lies outside, in words."""

    key: str
    numbers: Mapping[str, Any]
    outside: str | None


def round_off_gate(
    baseline: Evidence,
    candidate: Evidence,
    perturbed: Sequence[Evidence],
    *,
    perturbations: int = LEAST_PERTURBATIONS,
    least_steps: int = LEAST_STEPS,
) -> Verdict:
    """Compare a candidate with the envelope of perturbed baselines.

    Args:
        perturbed: the baseline from perturbed weights; at least ``perturbations`` of them.
        least_steps: fewer steps say little.
    """
    refused = refusal("round-off", baseline, candidate)
    if refused is None:
        refused = _unusable(baseline, candidate, perturbed, perturbations, least_steps)
    if refused is not None:
        return refused
    findings = [
        _series(baseline, candidate, perturbed, "loss", _losses),
        _series(baseline, candidate, perturbed, "log_grad_norm", _log_norms),
        _drift(baseline, candidate, perturbed),
        *_gradients(baseline, candidate, perturbed),
    ]
    numbers: dict[str, Any] = {"steps": len(baseline.points), "perturbations": len(perturbed)}
    numbers |= {finding.key: dict(finding.numbers) for finding in findings}
    outside = [finding.outside for finding in findings if finding.outside is not None]
    if outside:
        return Verdict("round-off", "fail", "; ".join(outside), numbers)
    why = (
        f"{len(baseline.points)} steps and the gradients of step 1 stay inside the envelope of {len(perturbed)} "
        "perturbed baselines"
    )
    return with_leak_probe(Verdict("round-off", "pass", why, numbers), (baseline, candidate))


def _unusable(
    baseline: Evidence,
    candidate: Evidence,
    perturbed: Sequence[Evidence],
    perturbations: int,
    least_steps: int,
) -> Verdict | None:
    """What is missing or does not belong together."""

    def answer(verdict: Any, why: str) -> Verdict:
        return Verdict("round-off", verdict, why)

    for run in (candidate, *perturbed):
        if (run.seed, run.data_seed) != (baseline.seed, baseline.data_seed):
            return answer(
                "not comparable", f"{baseline.name} and {run.name} have other initial weights or data order"
            )
        different = _other_steps(baseline, run)
        if different is not None and run.end == "finished":
            return answer("not comparable", different)
    for run in perturbed:
        difference = other_environment(baseline, run)
        if difference is not None:
            return answer("not comparable", difference)
        if run.end != "finished":
            return answer(
                "not comparable",
                f"the perturbed baseline {run.name} {run.end}: {run.reason}; there is no envelope",
            )
    steps = len(baseline.points)
    if steps < least_steps:
        return answer("inconclusive", f"{steps} steps, at least {least_steps} are needed")
    for run in (baseline, candidate, *perturbed):
        if run.gradients is None:
            return answer("inconclusive", f"{run.name} has no gradients of step 1: train it with --probe")
    if len(perturbed) < perturbations:
        return answer(
            "inconclusive", f"{len(perturbed)} perturbed baselines, at least {perturbations} make an envelope"
        )
    return None


def _other_steps(baseline: Evidence, run: Evidence) -> str | None:
    """Why two runs cannot be laid on each other step by step; None where they can."""
    ends = [one.points[-1].tokens if one.points else 0 for one in (baseline, run)]
    if [point.tokens for point in baseline.points] != [point.tokens for point in run.points]:
        return (
            f"{baseline.name} and {run.name} do not have the same steps ({len(baseline.points)} and "
            f"{len(run.points)}, {ends[0]:,} and {ends[1]:,} tokens): round-off is compared step by step; another "
            "batch is a statistical change"
        )
    for step, (one, other) in enumerate(zip(baseline.points, run.points, strict=True), 1):
        if (one.loss is None) != (other.loss is None):
            return f"at step {step} tokens carry loss in one of {baseline.name} and {run.name}"
    return None


def _losses(run: Evidence) -> NDArray[np.float64]:
    return np.array([point.loss for point in run.points if point.loss is not None], dtype=np.float64)


def _log_norms(run: Evidence) -> NDArray[np.float64]:
    """A step that overflowed has no norm: as 0, so that it agrees with one that overflowed too, and with no other."""
    norms = [0.0 if math.isnan(point.grad_norm) else point.grad_norm for point in run.points]
    return np.array([math.log(max(norm, 1e-38)) for norm in norms], dtype=np.float64)


def _series(
    baseline: Evidence,
    candidate: Evidence,
    perturbed: Sequence[Evidence],
    name: str,
    values: Callable[[Evidence], NDArray[np.float64]],
) -> _Finding:
    """At each step ``|difference| <= 3 x`` the 95th percentile of the perturbed runs' differences around it, or of the
    largest at the step itself where that is more."""
    reference = values(baseline)
    scattered = np.stack([np.abs(values(run) - reference) for run in perturbed])
    envelope = _envelope(scattered, _floor(reference))
    limits = FACTOR * envelope
    differences = np.abs(values(candidate) - reference)
    # Not `> limits`: a difference that is not a number is outside.
    beyond = int((~(differences <= limits)).sum())
    ratios = np.where(np.isfinite(differences), differences / limits, np.inf)
    worst = int(ratios.argmax())
    numbers = {
        "envelope_first": float(envelope[0]),
        "envelope_last": float(envelope[-1]),
        "worst_at_step": worst + 1,
        "worst": float(differences[worst]),
        "limit": float(limits[worst]),
        "steps_outside": beyond,
    }
    words = {"loss": "loss", "log_grad_norm": "log gradient norm"}[name]
    outside = (
        f"{words}: {beyond} of {len(differences)} steps are outside the envelope, step {worst + 1} with a difference "
        f"of {differences[worst]:.3g} where {limits[worst]:.3g} is allowed"
    )
    return _Finding(name, numbers, outside if beyond else None)


def _envelope(scattered: NDArray[np.float64], floor: float) -> NDArray[np.float64]:
    """(steps,): 95th percentile of (runs, steps) absolute differences within the steps around each, and at least the
    largest at the step itself: a batch that makes runs jump apart does so in all of them."""
    steps = scattered.shape[1]
    reach = max(NEIGHBOURS, round(NEIGHBOUR_SHARE * steps))
    found = [
        percentile(scattered[:, max(0, step - reach) : step + reach + 1].ravel().tolist(), SHARE)
        for step in range(steps)
    ]
    around = np.array(found, dtype=np.float64)
    largest: NDArray[np.float64] = scattered.max(axis=0)
    return np.maximum(np.maximum(around, largest), floor).astype(np.float64)


def _floor(values: NDArray[np.float64]) -> float:
    """One unit of fp32 in a sum of that size: an envelope cannot be finer."""
    return _FP32_EPSILON * max(1.0, float(np.abs(values).max()))


def _drift(baseline: Evidence, candidate: Evidence, perturbed: Sequence[Evidence]) -> _Finding:
    """The mean signed loss difference over the last 20% of the steps lies inside the envelope.

    An offset belongs to a run as a whole, so that three perturbed runs are three observations of it: 3 x the largest
    of theirs is allowed, and in any case what a single step there may differ by (the 95th percentile).
    """
    reference = _losses(baseline)
    last = max(1, round(LAST_SHARE * len(reference)))
    theirs = [(_losses(run) - reference)[-last:] for run in perturbed]
    means = [float(one.mean()) for one in theirs]
    single = percentile(np.abs(np.concatenate(theirs)).tolist(), SHARE)
    limit = max(single, FACTOR * max(abs(mean) for mean in means), _floor(reference))
    ours = float((_losses(candidate) - reference)[-last:].mean())
    numbers = {"limit": limit, "mean": ours, "perturbed": means, "steps": last}
    outside = f"the loss of the last {last} steps differs by {ours:+.3g} on average, limit {limit:.3g}"
    return _Finding("last_fifth", numbers, None if abs(ours) <= limit else outside)


@dataclass(frozen=True)
class _Gap:
    """Between two gradients of one parameter: ``1 - cosine``, and ``|log(norm ratio)|``."""

    turn: float
    scale: float


def _gap(reference: NDArray[np.float32], other: NDArray[np.float32]) -> _Gap:
    one, two = reference.astype(np.float64).ravel(), other.astype(np.float64).ravel()
    norm, norm_other = float(np.linalg.norm(one)), float(np.linalg.norm(two))
    if norm == 0 and norm_other == 0:
        return _Gap(0.0, 0.0)
    if norm == 0 or norm_other == 0 or not math.isfinite(norm_other):
        return _Gap(2.0, math.inf)
    cosine = float(one @ two) / (norm * norm_other)
    return _Gap(max(0.0, 1 - cosine), abs(math.log(norm_other / norm)))


def _gradients(
    baseline: Evidence, candidate: Evidence, perturbed: Sequence[Evidence]
) -> tuple[_Finding, _Finding]:
    """Each parameter's gradient turns and grows at most 3 x as much as in the worst perturbed run.

    A cosine alone is blind to scale, and AdamW hides scale from the loss.
    """
    reference = _load(baseline)
    ours = _load(candidate)
    theirs = [_load(run) for run in perturbed]
    relative = GRADIENT_EPSILONS * baseline.epsilon
    # A gradient with a relative error r in a random direction turns by 1 - cosine = r^2 / 2.
    floors = _Gap(relative**2 / 2, math.log1p(relative))
    turns: dict[str, tuple[float, float]] = {}
    scales: dict[str, tuple[float, float]] = {}
    for name, gradient in reference.items():
        if name not in ours or ours[name].shape != gradient.shape:
            turns[name], scales[name] = (2.0, floors.turn), (math.inf, floors.scale)
            continue
        gap = _gap(gradient, ours[name])
        spread = [_gap(gradient, run[name]) for run in theirs]
        turns[name] = gap.turn, max(FACTOR * max(one.turn for one in spread), floors.turn)
        scales[name] = gap.scale, max(FACTOR * max(one.scale for one in spread), floors.scale)
    for name in ours.keys() - reference.keys():
        turns[name], scales[name] = (2.0, floors.turn), (math.inf, floors.scale)
    return (
        _worst("gradient_cosine", "1 - cosine", turns, floors.turn),
        _worst("gradient_norm", "log norm ratio", scales, floors.scale),
    )


def _load(run: Evidence) -> _Gradients:
    assert run.gradients is not None
    return run.gradients()


def _worst(key: str, words: str, found: Mapping[str, tuple[float, float]], floor: float) -> _Finding:
    """The parameter that is furthest outside, or nearest to it: (its value, its limit)."""
    name = max(found, key=lambda one: found[one][0] / found[one][1])
    value, limit = found[name]
    beyond = sum(1 for one, limit_of_one in found.values() if not one <= limit_of_one)
    numbers = {
        "parameters": len(found),
        "outside": beyond,
        "worst": name,
        "value": value if math.isfinite(value) else None,
        "limit": limit,
        "floor": floor,
    }
    outside = (
        f"gradients of step 1: {beyond} of {len(found)} parameters are outside, {name} by {words} = {value:.3g}, "
        f"limit {limit:.3g}"
    )
    return _Finding(key, numbers, outside if beyond else None)
