"""The round-off tier: inside the envelope of perturbed baselines, step by step and in each gradient."""

from typing import Any

import numpy as np
import pytest
from gate_examples import ENVIRONMENT, GRADIENTS, STEPS, evidence, is_finite_document, losses, noisy

from drivetrain.tune.gate import Evidence, Leak
from drivetrain.tune.gate_roundoff import round_off_gate

BASE = evidence("base")
PERTURBED = [noisy(f"ulp{seed}", seed) for seed in range(3)]


def judged(candidate: Evidence, perturbed: list[Evidence] = PERTURBED) -> Any:
    found = round_off_gate(BASE, candidate, perturbed)
    assert found.tier == "round-off"
    assert is_finite_document(found.numbers)
    return found


def test_another_rounding_passes() -> None:
    found = judged(noisy("ours", 9))
    assert found.verdict == "pass", found.why
    assert found.numbers["loss"]["steps_outside"] == 0


def test_rounding_is_passed_nearly_always() -> None:
    passed = sum(judged(noisy("ours", seed)).passed for seed in range(100, 200))
    assert passed >= 97


def test_an_early_difference_that_late_ones_would_hide_fails() -> None:
    values = losses()
    values[5] += 0.02
    late = [point.loss for point in PERTURBED[0].points[80:] if point.loss is not None]
    assert np.abs(np.array(late) - losses()[80:]).max() > 0.02, "that far apart are perturbed runs in the end"
    found = judged(evidence("ours", losses=values))
    assert found.verdict == "fail"
    assert (found.numbers["loss"]["worst_at_step"], found.numbers["loss"]["steps_outside"]) == (6, 1)


def test_a_drift_that_no_single_step_shows_fails() -> None:
    values = noisy("ours", 9)
    shifted = [
        point.loss + (0.06 if step >= 80 else 0)
        for step, point in enumerate(values.points)
        if point.loss is not None
    ]
    found = judged(evidence("ours", losses=shifted))
    assert found.verdict == "fail"
    assert "on average" in found.why


def test_the_scale_of_gradients_is_seen_though_the_loss_hides_it() -> None:
    doubled = {name: 2 * value for name, value in GRADIENTS.items()}
    found = judged(noisy("ours", 9, gradients=doubled))
    assert found.verdict == "fail"
    assert "log norm ratio = 0.693" in found.why
    assert found.numbers["gradient_cosine"]["outside"] == 0, "a cosine alone is blind to scale"


def test_the_gradient_norm_of_steps_is_judged_in_logarithms() -> None:
    found = judged(noisy("ours", 9, norms=[2.0] * STEPS))
    assert found.verdict == "fail"
    assert found.numbers["log_grad_norm"]["steps_outside"] > STEPS / 2


@pytest.mark.parametrize("name", GRADIENTS)
def test_one_gradient_that_turned_or_is_missing_fails_and_is_named(name: str) -> None:
    turned = {**GRADIENTS, name: -GRADIENTS[name]}
    assert name in judged(noisy("ours", 9, gradients=turned)).why
    lost = {key: value for key, value in GRADIENTS.items() if key != name}
    assert judged(noisy("ours", 9, gradients=lost)).verdict == "fail"
    frozen = {**GRADIENTS, name: np.zeros_like(GRADIENTS[name])}
    assert judged(noisy("ours", 9, gradients=frozen)).verdict == "fail"


def test_a_gradient_of_zero_on_both_sides_is_equal() -> None:
    zero = {"weight": GRADIENTS["weight"], "norm": np.zeros(16, dtype=np.float32)}
    perturbed = [noisy(f"ulp{seed}", seed, gradients=zero) for seed in range(3)]
    found = round_off_gate(evidence("base", gradients=zero), noisy("ours", 9, gradients=zero), perturbed)
    assert found.verdict == "pass", found.why


def test_the_floor_is_a_few_epsilons_of_the_compute_dtype() -> None:
    # Perturbations that hit nothing make no envelope; a kernel still rounds.
    still = [noisy(f"ulp{seed}", seed, gradients=GRADIENTS) for seed in range(3)]
    for epsilons, verdict in ((1.9, "pass"), (2.1, "fail")):
        grown = {
            name: (value * (1 + epsilons * 2.0**-7)).astype(np.float32) for name, value in GRADIENTS.items()
        }
        assert judged(noisy("ours", 9, gradients=grown), still).verdict == verdict


def test_equal_runs_pass_though_the_envelope_is_nothing() -> None:
    same = [evidence(f"ulp{seed}") for seed in range(3)]
    assert round_off_gate(BASE, evidence("ours"), same).passed


def test_a_loss_that_is_not_a_number_fails() -> None:
    values = losses()
    values[50] = np.nan
    found = round_off_gate(BASE, evidence("ours", losses=values), PERTURBED)
    assert found.verdict == "fail"


def test_fewer_than_three_perturbations_or_no_probe_are_inconclusive() -> None:
    found = judged(noisy("ours", 9), PERTURBED[:2])
    assert (found.verdict, "at least 3" in found.why) == ("inconclusive", True)
    assert judged(noisy("ours", 9, gradients=None)).verdict == "inconclusive"
    assert judged(noisy("ours", 9, leak=None)).verdict == "inconclusive"
    assert (
        judged(noisy("ours", 9), [*PERTURBED[:2], noisy("ulp", 3, gradients=None)]).verdict == "inconclusive"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"data_seed": 2},
        {"tokens_per_step": 500},
        {"environment": ENVIRONMENT | {"torch": "2.12.0"}},
    ],
)
def test_what_does_not_start_alike_is_not_comparable(change: dict[str, Any]) -> None:
    assert judged(noisy("ours", 9, **change)).verdict == "not comparable"
    assert judged(noisy("ours", 9), [*PERTURBED[:2], noisy("ulp", 3, **change)]).verdict == "not comparable"


def test_a_perturbed_baseline_that_diverged_makes_no_envelope() -> None:
    diverged = noisy("ulp", 3, end="diverged", reason="not finite")
    assert judged(noisy("ours", 9), [*PERTURBED[:2], diverged]).verdict == "not comparable"


def test_a_leak_fails_whatever_the_losses_say() -> None:
    assert judged(noisy("ours", 9, leak=Leak("leak", "0.1 nat"))).verdict == "fail"
