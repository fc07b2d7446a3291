"""What every tier refuses, and the exact tier: equal to the bit, or not."""

import dataclasses
import math

import pytest
from gate_examples import CLEAN, ENVIRONMENT, evidence, losses
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.tune.gate import Leak
from drivetrain.tune.gate_exact import exact_gate


def test_equal_runs_pass() -> None:
    found = exact_gate(evidence("a"), evidence("b"))
    assert (found.tier, found.verdict, found.passed) == ("exact", "pass", True)
    assert found.to_document().keys() == {"tier", "verdict", "why", "numbers"}


@given(step=st.integers(0, 99), loss=st.booleans())
def test_one_bit_in_one_step_fails_and_is_named(step: int, loss: bool) -> None:
    values, norms = losses().tolist(), [1.0] * 100
    changed = values if loss else norms
    changed[step] = math.nextafter(changed[step], 9)
    found = exact_gate(evidence("a"), evidence("b", losses=values, norms=norms))
    assert found.verdict == "fail"
    assert found.numbers["first_differing_step"] == step + 1
    assert f"step {step + 1} first: {'loss' if loss else 'gradient norm'}" in found.why


def test_the_first_of_many_differences_is_told() -> None:
    values = losses()
    values[40:] += 0.25
    found = exact_gate(evidence("a"), evidence("b", losses=values))
    assert "60 of 100 steps differ, step 41 first" in found.why
    assert "a difference of 0.25" in found.why


def test_a_step_without_loss_in_one_run_is_a_difference() -> None:
    values: list[float | None] = losses().tolist()
    values[3] = None
    assert exact_gate(evidence("a"), evidence("b", losses=values)).verdict == "fail"
    assert exact_gate(evidence("a", losses=values), evidence("b", losses=values)).verdict == "pass"


def test_too_few_steps_say_nothing() -> None:
    short = losses(19)
    found = exact_gate(evidence("a"), evidence("b", losses=short))
    assert (found.verdict, found.numbers["steps"]) == ("inconclusive", 19)


def test_runs_that_were_not_deterministic_are_made_again() -> None:
    found = exact_gate(evidence("a"), evidence("b", deterministic=False))
    assert found.verdict == "inconclusive"
    assert "run.deterministic=true" in found.why


@pytest.mark.parametrize("change", [{"seed": 2}, {"data_seed": 2}, {"tokens_per_step": 500}])
def test_other_seeds_or_batches_are_not_comparable(change: dict[str, int]) -> None:
    assert exact_gate(evidence("a"), evidence("b", **change)).verdict == "not comparable"


@pytest.mark.parametrize("key", ENVIRONMENT)
def test_another_environment_is_not_comparable_and_named(key: str) -> None:
    found = exact_gate(evidence("a"), evidence("b", environment=ENVIRONMENT | {key: "other"}))
    assert found.verdict == "not comparable"
    assert f"{key} {ENVIRONMENT[key]} and other" in found.why


@pytest.mark.parametrize("dataset", ["other", None])
def test_other_data_is_not_comparable(dataset: str | None) -> None:
    assert exact_gate(evidence("a"), evidence("b", dataset=dataset)).verdict == "not comparable"
    both = [evidence(name, dataset=dataset) for name in "ab"]
    assert exact_gate(*both).verdict == ("pass" if dataset else "not comparable")


@pytest.mark.parametrize("end", ["diverged", "failed"])
def test_a_candidate_that_ended_badly_fails_and_a_baseline_is_nothing_to_compare_with(end: str) -> None:
    bad = evidence("bad", end=end, reason="the loss at step 7 is not finite")
    assert exact_gate(evidence("a"), bad).verdict == "fail"
    assert "step 7" in exact_gate(evidence("a"), bad).why
    assert exact_gate(bad, evidence("b")).verdict == "not comparable"


def test_a_run_that_is_not_finished_is_not_comparable() -> None:
    running = evidence("b", end="unfinished", reason="it is running")
    assert exact_gate(evidence("a"), running).verdict == "not comparable"
    assert exact_gate(running, evidence("a")).verdict == "not comparable"


def test_the_leak_probe_decides_beside_the_bits() -> None:
    leaking = Leak("leak", "a loss moved by 0.1 nat")
    assert exact_gate(evidence("a"), evidence("b", leak=leaking)).verdict == "fail"
    assert exact_gate(evidence("a", leak=leaking), evidence("b")).verdict == "not comparable"
    for unknown in (None, Leak("not applicable", "blind")):
        found = exact_gate(evidence("a", leak=unknown), evidence("b"))
        assert found.verdict == "inconclusive"
        assert "equal to the bit" in found.why
    differing = evidence("b", losses=losses() + 1, leak=None)
    assert exact_gate(evidence("a"), differing).verdict == "fail", "a failure needs no probe"
    assert dataclasses.replace(evidence(), leak=CLEAN).leak == CLEAN
