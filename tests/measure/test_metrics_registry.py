"""The registry of metric keys and its page."""

import re
from pathlib import Path

import pytest

from drivetrain.errors import DrivetrainError
from drivetrain.measure.metrics import METRICS, markdown_table, metric

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_fresh() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == markdown_table(), "run: python -m drivetrain.measure.metrics > docs/metrics.md"


def test_each_key_carries_its_unit_and_each_definition_is_a_sentence() -> None:
    suffixes = {
        "s": ("_s",),
        "byte": ("_bytes",),
        "token/s": ("_tokens_per_sec", "/tokens_per_sec"),
        "FLOP/s": ("flops_per_sec",),
        "share": ("_frac", "mfu", "hfu"),
    }
    for key, entry in METRICS.items():
        assert key == entry.key
        assert re.fullmatch(r"[a-z]+(/[a-z_]+)+", key)
        assert entry.definition.endswith(".")
        assert key.endswith(suffixes.get(entry.unit, ("",)))


def test_a_key_that_an_error_could_turn_round_says_what_is_better() -> None:
    assert METRICS["throughput/tokens_per_sec"].better == "higher"
    assert METRICS["time/step_s"].better == "lower"
    assert METRICS["train/loss"].better == "lower"
    # Recomputing more raises it: no merit.
    assert METRICS["throughput/device/hfu"].better == "neither"


def test_the_registry_cannot_be_changed_and_an_unknown_key_names_its_neighbours() -> None:
    with pytest.raises(TypeError):
        METRICS["x"] = METRICS["train/loss"]  # type: ignore[index]
    assert metric("train/loss").unit == "nat/token"
    with pytest.raises(DrivetrainError, match="time/step_s"):
        metric("time/stepp_s")
