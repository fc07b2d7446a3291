"""The statistical tier: each verdict, the looks, and how often the rule errs on runs whose truth is known."""

from typing import Any

import numpy as np
import pytest
from gate_examples import ENVIRONMENT, evidence, is_finite_document, losses

from drivetrain.measure.statistics import student_t_cdf
from drivetrain.tune.gate import Evidence, Leak
from drivetrain.tune.gate_statistical import (
    LOOKS,
    Decision,
    confidence_of_look,
    decide,
    statistical_gate,
    tail_loss,
)

SIGMA = 0.002


def run(name: str, offset: float = 0.0, **changes: Any) -> Evidence:
    made: dict[str, Any] = {"losses": losses() + offset, "held_out": 3.5 + offset, "gradients": None}
    return evidence(name, **(made | changes))


def pairs(
    count: int, shift: float, *, spread: float = 1e-4, seed: int = 0
) -> list[tuple[Evidence, Evidence]]:
    draw = np.random.default_rng(seed)
    found = []
    for index in range(count):
        own = draw.normal(0, SIGMA)
        found.append(
            (
                run(f"a{index}", own, seed=index),
                run(f"b{index}", own + shift + draw.normal(0, spread), seed=index),
            )
        )
    return found


@pytest.mark.parametrize(
    ("shift", "verdict"), [(0.0, "pass"), (0.1, "fail"), (-0.1, "suspicious"), (0.01, "inconclusive")]
)
def test_each_verdict_is_reached(shift: float, verdict: str) -> None:
    found = statistical_gate(pairs(3, shift))
    assert found.verdict == verdict, found.why
    assert is_finite_document(found.numbers)
    assert found.numbers["train_loss"]["delta"] == pytest.approx(0.01, abs=0.005)


def test_both_statistics_must_pass() -> None:
    for shift, verdict in ((0.1, "fail"), (-0.1, "suspicious")):
        only_held_out = [
            (
                base,
                evidence(
                    "b", losses=[point.loss for point in base.points], held_out=3.5 + shift, seed=base.seed
                ),
            )
            for base, _ in pairs(3, 0.0)
        ]
        found = statistical_gate(only_held_out)
        assert found.verdict == verdict
        assert found.numbers["train_loss"]["answer"] == "pass"
        assert "held-out" in found.why


def test_one_run_per_arm_never_passes() -> None:
    found = statistical_gate(pairs(1, 0.0))
    assert (found.verdict, "the next look needs 3" in found.why) == ("inconclusive", True)
    assert statistical_gate([]).verdict == "inconclusive"


def test_pairs_between_two_looks_are_not_looked_at() -> None:
    wide = pairs(4, 0.0, spread=0.02)
    at_three = statistical_gate(wide[:3])
    assert at_three.verdict == "inconclusive"
    at_four = statistical_gate(wide)
    assert at_four.numbers["train_loss"] == at_three.numbers["train_loss"]
    assert "the next look needs 5" in at_four.why


def test_after_the_last_look_it_fails_closed() -> None:
    found = statistical_gate(pairs(8, 0.0, spread=0.2))
    assert found.verdict == "inconclusive"
    assert "last of the declared looks" in found.why
    assert not found.passed


def test_the_first_look_that_decides_counts() -> None:
    early = pairs(3, 0.0)
    late = [(base, run("worse", 5.0, seed=base.seed)) for base, _ in pairs(5, 0.0, seed=1)]
    assert statistical_gate([*early, *late]).passed


def test_the_error_is_divided_among_the_looks() -> None:
    assert sum(1 - confidence_of_look(look, 3) for look in (1, 2, 3)) == pytest.approx(0.05)
    assert confidence_of_look(1, 1) == 0.95
    base, ours = [0.0, 0.001, -0.001], [0.0005, 0.0, 0.001]
    found = decide(base, ours, confidence=confidence_of_look(1, 3))
    differences = np.array(ours) - np.array(base)
    t = (found.high - found.mean) / (differences.std(ddof=1) / np.sqrt(3))
    assert student_t_cdf(float(t), 2) == pytest.approx(1 - 0.01 / 2)


def test_further_seeds_of_the_baseline_make_its_deviation_better_known() -> None:
    draw = np.random.default_rng(4)
    more = [run(f"c{seed}", draw.normal(0, 0.05), seed=seed) for seed in range(20, 60)]
    found = statistical_gate(pairs(3, 0.0), more_baselines=more)
    assert found.numbers["train_loss"]["sigma"] == pytest.approx(0.05, rel=0.3)
    unlike = [
        run("c", 9.0, seed=1, data_seed=5),
        run("c", 9.0, seed=1, end="diverged"),
        run("c", 9.0, seed=1, environment={}),
        run("c", 9.0, seed=1, tokens_per_step=10),
    ]
    plain = statistical_gate(pairs(3, 0.0))
    assert statistical_gate(pairs(3, 0.0), more_baselines=unlike).numbers == plain.numbers


def test_delta_is_three_deviations_and_at_least_a_hundredth() -> None:
    assert decide([0, 0, 0], [0, 0, 0], confidence=0.95) == Decision("pass", 0, 0, 0, 0.01, 0)
    wide = decide([0.0, 0.1, -0.1], [0.0, 0.1, -0.1], confidence=0.95)
    assert (wide.sigma, wide.delta) == (pytest.approx(0.1), pytest.approx(0.3))


def test_the_last_fifth_is_of_tokens_and_not_of_steps() -> None:
    values = [9.0] * 40 + [1.0, 2.0] * 5
    fine = evidence("fine", losses=values, tokens_per_step=1000)
    assert tail_loss(fine, 50_000) == pytest.approx(1.5)
    coarse = evidence("coarse", losses=[9.0] * 20 + [1.5] * 5, tokens_per_step=2000)
    assert tail_loss(coarse, 50_000) == pytest.approx(1.5)
    assert tail_loss(evidence("none", losses=[None] * 10), 10_000) is None


def test_another_batch_is_compared_at_equal_tokens() -> None:
    doubled = [
        (base, run(f"b{index}", 0.0, losses=losses()[1::2], tokens_per_step=2000, seed=index))
        for index, (base, _) in enumerate(pairs(3, 0.0))
    ]
    # Each second loss of a falling curve: the same tokens, a little lower.
    assert statistical_gate(doubled).verdict in ("pass", "inconclusive")
    longer = [(base, run("b", 0.0, tokens_per_step=2000, seed=base.seed)) for base, _ in pairs(3, 0.0)]
    found = statistical_gate(longer)
    assert found.verdict == "not comparable"
    assert "equal tokens" in found.why


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"end": "diverged", "reason": "not finite"}, "fail"),
        ({"held_out": None}, "inconclusive"),
        ({"held_out_tokens": 4096}, "not comparable"),
        ({"data_seed": 7}, "not comparable"),
        ({"dataset": "other"}, "not comparable"),
        ({"environment": ENVIRONMENT | {"torch": "2.12.0"}}, "not comparable"),
        ({"leak": Leak("leak", "0.1 nat")}, "fail"),
        ({"leak": None}, "inconclusive"),
        ({"held_out": float("nan")}, "fail"),
        ({"losses": [None] * 100}, "inconclusive"),
    ],
)
def test_what_is_wrong_with_a_candidate_decides(change: dict[str, Any], verdict: str) -> None:
    base = pairs(3, 0.0)
    assert statistical_gate([(base[0][0], run("b", seed=0, **change)), *base[1:]]).verdict == verdict


def simulated(draw: np.random.Generator, true: float, shared: float, known: int) -> str:
    """The rule's answer to runs whose statistic is normal with deviation 0.01; the truth is a difference of ``true``.

    ``shared`` is the correlation of a pair, ``known`` the number of further baseline runs.
    """
    luck, own = draw.normal(0, 0.01, (2, LOOKS[-1]))
    ours = shared * luck + np.sqrt(1 - shared**2) * own + true
    more = draw.normal(0, 0.01, known).tolist()
    for look, count in enumerate(LOOKS, 1):
        confidence = confidence_of_look(look, len(LOOKS))
        found = decide(luck[:count].tolist(), ours[:count].tolist(), confidence=confidence, more_seeds=more)
        if found.answer != "inconclusive":
            return found.answer
    return "inconclusive"


def rate(answer: str, true: float, shared: float, known: int = 0, trials: int = 2000) -> float:
    draw = np.random.default_rng(1)
    return sum(simulated(draw, true, shared, known) == answer for _ in range(trials)) / trials


def test_error_rates_of_pairs_that_share_their_luck() -> None:
    # Same seed on both sides: the difference of a pair varies by a fifth of what seeds do.
    assert rate("pass", 0.0, 0.98) > 0.98
    assert rate("pass", 0.15, 0.98) < 0.02
    assert rate("fail", 0.15, 0.98) > 0.95
    assert rate("suspicious", -0.15, 0.98) > 0.95
    # A true difference of delta itself: at the edge, where few seeds do not know delta well.
    assert rate("pass", 0.03, 0.98) < 0.5


@pytest.mark.long
def test_error_rates_of_identical_code_with_another_seed() -> None:
    assert rate("pass", 0.0, 0.0) > 0.9
    assert rate("pass", 0.0, 0.0, known=16) > 0.95
    assert rate("fail", 0.0, 0.0) < 0.01
    assert rate("suspicious", 0.0, 0.0) < 0.01
    assert rate("pass", 0.03, 0.0) < 0.1
    assert rate("pass", 0.06, 0.0) < 0.01


def test_steps_share_the_luck_of_their_run() -> None:
    """A test over steps takes one run's offset for many observations; the rule over runs does not."""
    draw = np.random.default_rng(5)
    rejected_by_steps = rejected_by_runs = 0
    trials = 300
    for _ in range(trials):
        offsets = draw.normal(0, SIGMA, 2 * LOOKS[0])
        series = offsets[:, None] + draw.normal(0, SIGMA, (2 * LOOKS[0], 200))
        base, ours = series[: LOOKS[0]], series[LOOKS[0] :]
        over_steps = (ours[0] - base[0]).mean() / ((ours[0] - base[0]).std(ddof=1) / np.sqrt(200))
        rejected_by_steps += abs(over_steps) > 1.97
        decision = decide(
            base.mean(axis=1).tolist(), ours.mean(axis=1).tolist(), confidence=confidence_of_look(1, 3)
        )
        rejected_by_runs += decision.answer in ("fail", "suspicious")
    assert rejected_by_steps > 0.7 * trials
    assert rejected_by_runs <= 0.01 * trials
