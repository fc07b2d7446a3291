"""A value is written as an override has it, wherever it is shown."""

import pytest

from drivetrain.config import leaf_values, load_config
from drivetrain.config.serialise import value_text
from drivetrain.measure.optimisation import OptimisationRecord


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (False, "false"), (None, "none"), (3, "3"), (3.0, "3.0"), ("bf16", "bf16")],
)
def test_truth_and_absence_are_written_as_in_an_override(value: object, text: str) -> None:
    assert value_text(value) == text
    record = OptimisationRecord("any", "section.leaf", value, requested=True, active=True)
    assert record.asked == f"section.leaf = {text}"


@pytest.mark.parametrize("preset", ["llama-2m", "llama2-7b"])
def test_every_value_of_a_preset_reads_back(preset: str) -> None:
    config = load_config(preset).config
    overrides = [f"{leaf.path}={value_text(value)}" for leaf, value in leaf_values(config) if value != ""]
    assert load_config(preset, overrides).config == config
