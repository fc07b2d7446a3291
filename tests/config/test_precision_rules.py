"""Contradictory settings of the loss scale are refused, with the nearest legal ones."""

import pytest

from drivetrain.config import LaunchFacts, load_config, violations
from drivetrain.config.precision_rules import PRECISION_RULES, SCALING_FIELDS, given_scaling


def broken(*overrides: str) -> dict[str, str]:
    config = load_config("llama-2m", list(overrides)).config
    return {one.rule: one.message for one in violations(config, LaunchFacts(), PRECISION_RULES)}


FP16 = "precision.params_dtype=fp16"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (FP16,),
        (FP16, "precision.loss_scale=2048"),
        (FP16, "precision.initial_loss_scale=1024", "precision.min_loss_scale=1024"),
        (FP16, "precision.hysteresis=1", "precision.loss_scale_window=1"),
    ],
)
def test_what_belongs_together_is_accepted(overrides: tuple[str, ...]) -> None:
    assert broken(*overrides) == {}


@pytest.mark.parametrize("path", SCALING_FIELDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_loss_scale_without_fp16_is_refused(path: str, dtype: str) -> None:
    found = broken(f"precision.params_dtype={dtype}", f"{path}=4")
    assert found.keys() == {"loss-scale-needs-fp16"}
    assert f"leave out {path}, or use precision.params_dtype=fp16" in found["loss-scale-needs-fp16"]


def test_a_constant_and_a_dynamic_scale_exclude_each_other() -> None:
    found = broken(FP16, "precision.loss_scale=2048", "precision.hysteresis=1", "precision.min_loss_scale=2")
    assert found.keys() == {"loss-scale-constant-or-dynamic"}
    assert (
        "leave out precision.min_loss_scale, precision.hysteresis" in found["loss-scale-constant-or-dynamic"]
    )


def test_the_least_scale_is_not_above_the_first() -> None:
    found = broken(FP16, "precision.initial_loss_scale=1024", "precision.min_loss_scale=2048")
    assert found.keys() == {"min-loss-scale-below-initial"}
    assert "min_loss_scale = 1024; initial_loss_scale = 2048" in found["min-loss-scale-below-initial"]


@pytest.mark.parametrize("name", ["loss_scale", "initial_loss_scale", "min_loss_scale"])
def test_scales_are_powers_of_two(name: str) -> None:
    found = broken(FP16, f"precision.{name}=1000")
    assert found.keys() == {"loss-scales-are-powers-of-two"}
    assert "nearest legal values: 512 and 1024" in found["loss-scales-are-powers-of-two"]


def test_what_was_given_is_told_from_defaults() -> None:
    config = load_config("llama-2m", [FP16, "precision.hysteresis=3"]).config
    assert given_scaling(config) == {"precision.hysteresis": 3}
