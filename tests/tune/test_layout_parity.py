"""Round-off is no difference, a wrong gradient is one, and what is noise in one process says nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest

from drivetrain.tune.layout_parity import (
    LEAST_PERTURBATIONS,
    TOLERANCE,
    Arrays,
    TrainedSteps,
    compare_with_one_process,
)

FP32, BF16 = 2.0**-23, 2.0**-7
NAMES = ("embedding.weight", "blocks.0.mlp.up.weight", "final_norm.weight")


def arrays(seed: int, size: float = 1.0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: (size * draw.standard_normal((40, 25))).astype(np.float32) for name in NAMES}


def moved(values: Arrays, share: float, seed: int) -> dict[str, np.ndarray]:
    """Each tensor moved by ``share`` of its norm in a random direction."""
    draw = np.random.default_rng(seed)
    result = {}
    for name, value in values.items():
        direction = draw.standard_normal(value.shape)
        direction *= share * np.linalg.norm(value) / np.linalg.norm(direction)
        result[name] = (value + direction).astype(np.float32)
    return result


ALONE = TrainedSteps([5.0, 4.5, 4.2], arrays(1, 1e-3), arrays(2))


def run(gradients: float = 0.0, parameters: float = 0.0, loss: float = 0.0, seed: int = 7) -> TrainedSteps:
    """The run of one process, moved by these relative differences."""
    return TrainedSteps(
        [value * (1 + loss) if value is not None else None for value in ALONE.losses],
        moved(ALONE.gradients, gradients, seed),
        moved(ALONE.parameters, parameters, seed + 1),
    )


def perturbed(**sizes: float) -> list[TrainedSteps]:
    return [run(**sizes, seed=100 * number) for number in range(1, LEAST_PERTURBATIONS + 1)]


def test_equal_runs_agree_and_nothing_is_left_out() -> None:
    found = compare_with_one_process(ALONE, ALONE, epsilon=FP32)
    assert found.verdict == "agree"
    assert [one.name for one in found.of("loss")] == ["step 1", "step 2", "step 3"]
    assert (
        {one.name for one in found.of("gradient")}
        == {one.name for one in found.of("parameter")}
        == set(NAMES)
    )
    assert all(one.value == 0 for one in found.differences)


@pytest.mark.parametrize("what", ["gradients", "parameters", "loss"])
def test_a_relative_difference_is_the_norm_of_the_difference_over_the_norm(what: str) -> None:
    found = compare_with_one_process(ALONE, run(**{what: 1e-3}), epsilon=FP32)
    kind = {"gradients": "gradient", "parameters": "parameter", "loss": "loss"}[what]
    for one in found.differences:
        assert one.value == pytest.approx(1e-3 if one.what == kind else 0.0, rel=0.01, abs=1e-9)


@pytest.mark.parametrize("what", ["gradients", "parameters", "loss"])
def test_up_to_its_tolerance_a_difference_needs_no_envelope_and_above_it_does(what: str) -> None:
    within, above = run(**{what: 0.9 * TOLERANCE}), run(**{what: 1.2 * TOLERANCE})
    assert compare_with_one_process(ALONE, within, epsilon=FP32).verdict == "agree"
    undecided = compare_with_one_process(ALONE, above, epsilon=FP32)
    assert undecided.verdict == "undecided"
    # Round-off that moves one process as far makes it none, and one that does not leaves it one.
    assert (
        compare_with_one_process(ALONE, above, perturbed(**{what: TOLERANCE}), epsilon=FP32).verdict
        == "agree"
    )
    found = compare_with_one_process(ALONE, above, perturbed(**{what: 0.1 * TOLERANCE}), epsilon=FP32)
    assert found.verdict == "differ"
    assert "more than round-off" in found.why


def test_an_envelope_is_three_times_the_worst_perturbed_run_of_the_same_quantity() -> None:
    envelope = [*perturbed(gradients=1e-4)[:-1], run(gradients=2e-4, seed=9)]
    for share, verdict in ((5.9e-4, "agree"), (6.1e-4, "differ")):
        assert (
            compare_with_one_process(ALONE, run(gradients=share), envelope, epsilon=FP32).verdict == verdict
        )
    # That of gradients is none of parameters.
    assert compare_with_one_process(ALONE, run(parameters=1e-4), envelope, epsilon=FP32).verdict == "differ"


def test_a_narrow_compute_dtype_rounds_gradients_by_two_of_its_epsilons() -> None:
    assert compare_with_one_process(ALONE, run(gradients=1.9 * BF16), epsilon=BF16).verdict == "agree"
    assert compare_with_one_process(ALONE, run(gradients=2.1 * BF16), epsilon=BF16).verdict == "undecided"
    assert compare_with_one_process(ALONE, run(loss=1e-3), epsilon=BF16).verdict == "undecided", (
        "sums are fp32"
    )


def test_a_scaled_gradient_is_named() -> None:
    gradients = {**ALONE.gradients, NAMES[1]: 2 * ALONE.gradients[NAMES[1]]}
    found = compare_with_one_process(
        ALONE, replace(ALONE, gradients=gradients), perturbed(gradients=1e-6, parameters=1e-6), epsilon=FP32
    )
    assert found.verdict == "differ"
    assert (
        f"1 of 9 quantities differ by more than round-off, most of all the gradient {NAMES[1]}, by 1 "
        in found.why
    )
    assert found.of("gradient")[0].name == NAMES[1]
    assert found.of("gradient")[0].value == pytest.approx(1.0)


def test_a_gradient_that_is_round_off_alone_is_held_against_all_of_them() -> None:
    tiny = {**ALONE.gradients, NAMES[2]: 1e-6 * ALONE.gradients[NAMES[2]]}
    other = {**tiny, NAMES[2]: -tiny[NAMES[2]]}
    alone = replace(ALONE, gradients=tiny)
    assert compare_with_one_process(alone, replace(alone, gradients=other), epsilon=FP32).verdict == "agree"
    # A parameter has no such excuse.
    alone = replace(ALONE, parameters=tiny)
    assert (
        compare_with_one_process(alone, replace(alone, parameters=other), epsilon=FP32).verdict == "undecided"
    )


@pytest.mark.parametrize("broken", ["missing", "shape", "nan", "more"])
def test_what_cannot_be_compared_is_never_within(broken: str) -> None:
    parameters = dict(ALONE.parameters)
    if broken == "missing":
        del parameters[NAMES[0]]
    elif broken == "shape":
        parameters[NAMES[0]] = parameters[NAMES[0]][:1]
    elif broken == "nan":
        parameters[NAMES[0]] = parameters[NAMES[0]] * np.float32("nan")
    else:
        parameters["more"] = parameters[NAMES[0]]
    several = replace(ALONE, parameters=parameters)
    found = compare_with_one_process(ALONE, several, [several] * 3, epsilon=FP32)
    assert found.verdict == "differ", "not even where runs of one process are broken alike"
    worst = found.of("parameter")[0]
    assert math.isinf(worst.value)
    assert worst.to_document()["difference"] is None


def test_losses_are_compared_step_by_step_and_a_missing_one_is_a_difference() -> None:
    silent = replace(ALONE, losses=[5.0, None, 4.2])
    assert compare_with_one_process(silent, silent, epsilon=FP32).verdict == "agree"
    for losses in ([5.0, 4.5], [5.0, None, 4.2], [5.0, math.nan, 4.2]):
        found = compare_with_one_process(ALONE, replace(ALONE, losses=losses), epsilon=FP32)
        assert found.verdict == "undecided"
        assert "the loss of step" in found.why


def test_where_most_gradients_are_noise_in_one_process_there_is_no_verdict() -> None:
    noise = perturbed(gradients=0.5)
    assert compare_with_one_process(ALONE, run(gradients=0.4), noise, epsilon=FP32).verdict == "withheld"
    quiet = {name: ALONE.gradients[name] for name in NAMES[:2]}
    some = [replace(one, gradients={**one.gradients, **quiet}) for one in noise]
    found = compare_with_one_process(ALONE, ALONE, some, epsilon=FP32)
    assert found.verdict == "agree"
    assert found.why.endswith("; 1 gradients compare with nothing: they are noise in one process as well")


def test_parameters_that_are_noise_in_one_process_are_said_to_be() -> None:
    found = compare_with_one_process(ALONE, run(parameters=0.4), perturbed(parameters=0.5), epsilon=FP32)
    assert f"; {len(NAMES)} parameters compare with nothing" in found.why
