"""The statistical tier: another arithmetic trains as well, within what seeds make of one configuration.

The unit is the run. Steps of one run share its luck, and a test over them rejects identical code. Runs are paired by
seed and data order; the interval of the mean difference must lie inside ``+-delta`` at one of few declared looks.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drivetrain.measure.statistics import mean_with_interval
from drivetrain.tune.gate import Answer, Evidence, Verdict, refusal, with_leak_probe

__all__ = [
    "CONFIDENCE",
    "LEAST_DELTA",
    "LOOKS",
    "Decision",
    "confidence_of_look",
    "decide",
    "statistical_gate",
    "tail_loss",
]

LOOKS = (3, 5, 8)
"""Numbers of pairs after which is looked, declared beforehand."""
LEAST_DELTA = 0.01
"""Nats: a difference below it is none."""
SIGMAS = 3.0
CONFIDENCE = 0.95
"""Over all looks together: each look has its share of the error (Bonferroni)."""
LAST_LOOK_SHARE = 0.6
"""Of the allowed error, for the last look; the ones before have equal parts of the rest. Early looks are for what is
clear at once. Equal parts would leave identical code with other seeds inconclusive twice as often (docs/gate.md)."""
LAST_SHARE = 0.2


@dataclass(frozen=True)
class Decision:
    """What one statistic says at one look.

    Attributes:
        answer: ``inconclusive`` where the interval holds an end of ``+-delta``.
        mean, low, high: of the paired differences, candidate - baseline, nats.
        delta: the largest difference that counts as none.
        sigma: deviation of the baseline's statistic over seeds.
    """

    answer: Literal["pass", "fail", "suspicious", "inconclusive"]
    mean: float
    low: float
    high: float
    delta: float
    sigma: float


def confidence_of_look(look: int, looks: int) -> float:
    """Confidence of the interval at look number ``look`` (from 1) of ``looks``."""
    error = 1 - CONFIDENCE
    if looks > 1:
        error *= LAST_LOOK_SHARE if look == looks else (1 - LAST_LOOK_SHARE) / (looks - 1)
    return 1 - error


def decide(
    baseline: Sequence[float],
    candidate: Sequence[float],
    *,
    confidence: float,
    more_seeds: Sequence[float] = (),
) -> Decision:
    """Compare paired statistics, at least two of them.

    Two-sided: wholly inside ``(-delta, delta)`` passes, wholly above fails, wholly below is suspicious - training
    that got better by a change that should change nothing usually sees what it must not see.

    Args:
        confidence: of the interval of the mean difference.
        more_seeds: statistics of further runs of the baseline; they make its deviation better known.
    """
    sigma = statistics.stdev([*baseline, *more_seeds])
    delta = max(LEAST_DELTA, SIGMAS * sigma)
    differences = [ours - theirs for theirs, ours in zip(baseline, candidate, strict=True)]
    mean, low, high = mean_with_interval(differences, confidence=confidence)
    answer: Literal["pass", "fail", "suspicious", "inconclusive"]
    if -delta < low and high < delta:
        answer = "pass"
    elif low > delta:
        answer = "fail"
    elif high < -delta:
        answer = "suspicious"
    else:
        answer = "inconclusive"
    return Decision(answer, mean, low, high, delta, sigma)


def tail_loss(run: Evidence, total_tokens: int) -> float | None:
    """Mean training loss over the last 20% of ``total_tokens``, weighted by tokens; None where no step has one."""
    weight = weighted = 0.0
    before = 0
    for point in run.points:
        tokens, before = point.tokens - before, point.tokens
        if point.loss is not None and (1 - LAST_SHARE) * total_tokens < point.tokens <= total_tokens:
            weight += tokens
            weighted += tokens * point.loss
    return weighted / weight if weight else None


def statistical_gate(
    pairs: Sequence[tuple[Evidence, Evidence]],
    *,
    looks: Sequence[int] = LOOKS,
    more_baselines: Sequence[Evidence] = (),
) -> Verdict:
    """Judge pairs (baseline, candidate) at each look that there are pairs for; the first that decides counts.

    Both statistics, training loss over the last 20% of tokens and held-out loss, must pass.

    Args:
        pairs: each of one data order, in the order they are looked at.
        looks: declared numbers of pairs, increasing.
        more_baselines: further runs of the baseline with other seeds and the same data order, finished.
    """
    if not pairs:
        return Verdict("statistical", "inconclusive", f"no pair of runs; the first look needs {looks[0]}")
    refused = _refused(pairs)
    if refused is not None:
        return refused
    values = _statistics(pairs)
    if isinstance(values, Verdict):
        return values
    more = _of_more_seeds(pairs[0][0], more_baselines)
    verdict = Verdict("statistical", "inconclusive", "")
    for look, count in enumerate(looks, 1):
        if count > len(pairs) or count < 2:
            break
        confidence = confidence_of_look(look, len(looks))
        decisions = {
            name: decide(base[:count], ours[:count], confidence=confidence, more_seeds=more[name])
            for name, (base, ours) in values.items()
        }
        verdict = _joined(decisions, count, look, looks, confidence)
        if verdict.verdict != "inconclusive":
            return with_leak_probe(verdict, pairs[0])
    following = next((count for count in looks if count > len(pairs)), None)
    if following is not None:
        have = "1 pair" if len(pairs) == 1 else f"{len(pairs)} pairs"
        so_far = f"{verdict.why}; " if verdict.why else ""
        why = f"{so_far}{have} of runs, the next look needs {following}"
        return Verdict("statistical", "inconclusive", why, {**verdict.numbers, "pairs": len(pairs)})
    why = f"{verdict.why}; that was the last of the declared looks {tuple(looks)}: not shown to train as well"
    return Verdict("statistical", "inconclusive", why, verdict.numbers)


def _refused(pairs: Sequence[tuple[Evidence, Evidence]]) -> Verdict | None:
    reference = pairs[0][0]
    for baseline, candidate in pairs:
        refused = refusal("statistical", baseline, candidate) or refusal("statistical", reference, baseline)
        if refused is not None:
            return refused
        if baseline.data_seed != candidate.data_seed:
            why = f"{baseline.name} and {candidate.name} saw their data in another order: a pair shares data.seed"
            return Verdict("statistical", "not comparable", why)
        if baseline.points and candidate.points:
            ends = baseline.points[-1].tokens, candidate.points[-1].tokens
            # The last step of the larger batch may end a little later.
            step = max(run.points[0].tokens for run in (baseline, candidate))
            if abs(ends[0] - ends[1]) >= step:
                why = (
                    f"{baseline.name} and {candidate.name} were trained on {ends[0]:,} and {ends[1]:,} tokens: equal "
                    "tokens are compared"
                )
                return Verdict("statistical", "not comparable", why)
    return None


def _statistics(
    pairs: Sequence[tuple[Evidence, Evidence]],
) -> dict[str, tuple[list[float], list[float]]] | Verdict:
    """Name → (of the baselines, of the candidates)."""
    train: tuple[list[float], list[float]] = ([], [])
    held_out: tuple[list[float], list[float]] = ([], [])
    for pair in pairs:
        total = min((run.points[-1].tokens for run in pair if run.points), default=0)
        for side, run in enumerate(pair):
            loss = tail_loss(run, total)
            if loss is None:
                why = f"{run.name} has no training loss in the last 20% of its tokens"
                return Verdict("statistical", "inconclusive", why)
            if run.held_out is None:
                why = f"{run.name} has no held-out loss: train with training.eval_iters above 0"
                return Verdict("statistical", "inconclusive", why)
            if not (math.isfinite(loss) and math.isfinite(run.held_out)):
                why = f"{run.name} has a loss that is not finite"
                answer: Answer = "fail" if side else "not comparable"
                return Verdict("statistical", answer, why)
            train[side].append(loss)
            held_out[side].append(run.held_out)
        if pair[0].held_out_tokens != pair[1].held_out_tokens:
            why = (
                f"{pair[0].name} and {pair[1].name} were evaluated on {pair[0].held_out_tokens} and "
                f"{pair[1].held_out_tokens} held-out tokens"
            )
            return Verdict("statistical", "not comparable", why)
    return {"train_loss": train, "held_out_loss": held_out}


def _of_more_seeds(reference: Evidence, runs: Sequence[Evidence]) -> dict[str, list[float]]:
    """The statistics of further baselines, of those that are like the first one."""
    found: dict[str, list[float]] = {"train_loss": [], "held_out_loss": []}
    for run in runs:
        alike = (
            run.end == "finished"
            and run.dataset == reference.dataset
            and run.data_seed == reference.data_seed
        )
        tokens = [point.tokens for point in run.points]
        if not alike or run.environment != reference.environment or not tokens:
            continue
        loss = tail_loss(run, tokens[-1])
        if loss is None or run.held_out is None or tokens[-1] != reference.points[-1].tokens:
            continue
        found["train_loss"].append(loss)
        found["held_out_loss"].append(run.held_out)
    return found


_WORDS = {"train_loss": "training loss of the last 20% of tokens", "held_out_loss": "held-out loss"}


def _joined(
    decisions: dict[str, Decision], count: int, look: int, looks: Sequence[int], confidence: float
) -> Verdict:
    """One verdict of both statistics."""
    answers = [decision.answer for decision in decisions.values()]
    answer: Answer = next(
        (one for one in ("fail", "suspicious", "inconclusive") if one in answers),
        "pass",
    )
    relation = {
        "pass": "inside",
        "fail": "worse than",
        "suspicious": "better than",
        "inconclusive": "neither inside nor outside",
    }
    told = [
        f"{_WORDS[name]} {one.mean:+.4f} nat ({one.low:+.4f} to {one.high:+.4f}), {relation[one.answer]} "
        f"+-{one.delta:.4f}"
        for name, one in decisions.items()
        if one.answer == answer
    ]
    numbers: dict[str, Any] = {
        "pairs": count,
        "look": look,
        "looks": list(looks),
        "confidence": confidence,
    }
    numbers |= {
        name: {
            "answer": one.answer,
            "mean": one.mean,
            "low": one.low,
            "high": one.high,
            "delta": one.delta,
            "sigma": one.sigma,
        }
        for name, one in decisions.items()
    }
    suspicion = (
        "; a change that should not change training made it better: look for what the model must not see"
        if answer == "suspicious"
        else ""
    )
    return Verdict("statistical", answer, f"{count} pairs: {'; '.join(told)}{suspicion}", numbers)
