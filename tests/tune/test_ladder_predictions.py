"""A ladder predicts each change before it tries it, says why where it cannot, and scores itself afterwards."""

import os
from pathlib import Path
from typing import Any

import pytest
from fake_runs import Climb, FakeRunner

from drivetrain.config import RunConfig
from drivetrain.report.ladder_rows import ladder_rows, totals
from drivetrain.tune.prediction_score import score_folder, score_of_step
from drivetrain.tune.session import contract
from drivetrain.tune.trainer import Attempt

ALONE = ("data.prefetch_batches=0",)


@pytest.fixture
def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Climb:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    return Climb(tmp_path)


def test_each_step_is_predicted_or_says_why_not_and_the_tune_says_how_far_it_was_off(climb: Climb) -> None:
    document = climb(overrides=ALONE, only=("data_workers", "fused_adamw", "bf16")).document
    steps = {step["entry"]: step for step in document["steps"]}
    # 40 of 100 ms are waiting; the fake worker brings half of that.
    workers = steps["data_workers"]
    assert workers["predicted"]["ratio"] == pytest.approx(100 / 60)
    assert "upper bound" in workers["predicted"]["rule"]
    assert workers["prediction_score"]["error"] == pytest.approx((0.40 - 0.20) / 0.20, rel=1e-6)
    # 20 ms of update for 23 passes, of which 10 are left; the fake one takes half.
    update = steps["fused_adamw"]["predicted"]
    parent = sum(steps["fused_adamw"]["classes_before"].values()) / 1e9 / 1.25
    assert update["ratio"] == pytest.approx(parent / (parent - 0.020 * 13 / 23), rel=1e-3)
    assert steps["bf16"]["predicted"] is None
    assert "bench gemm" in steps["bf16"]["no_prediction"]
    assert steps["bf16"]["prediction_score"] is None
    whole = document["prediction_score"]
    assert (whole["measured"], whole["predicted"]) == (3, 2)
    errors = [score_of_step(steps[name])["error"] for name in ("data_workers", "fused_adamw")]  # type: ignore[index]
    assert whole["median_error"] == pytest.approx(sum(errors) / 2)


def test_the_document_the_table_and_the_folder_say_the_same(climb: Climb) -> None:
    tune = climb(overrides=ALONE, only=("data_workers",))
    printed = contract(tune.document)
    assert printed["prediction_score"] == tune.document["prediction_score"]
    assert printed["steps"][0]["prediction_score"] == tune.document["steps"][0]["prediction_score"]
    (row,) = ladder_rows(tune.document["steps"])
    assert (row.predicted, row.error) == ("1.667x", "100%")
    assert "1 of 1 measured steps predicted" in dict(totals(tune.document))["predicted gains"]
    assert score_folder(climb.folder / "tunes").whole.to_document() == tune.document["prediction_score"]


def test_values_of_a_knob_are_predicted_too(climb: Climb) -> None:
    runner = FakeRunner()
    tune = climb(runner, overrides=ALONE, only=("data_workers",), knob_trials=3)
    knobs = [step for step in tune.document["steps"] if step["change"].get("data.num_workers", 1) > 1]
    assert knobs
    assert all(step["predicted"] is not None for step in knobs), knobs
    other = [step for step in tune.document["steps"] if set(step["change"]) == {"data.prefetch_factor"}]
    assert all("unevenly" in step["no_prediction"] for step in other)


def test_a_profile_that_is_gone_predicts_nothing_and_stops_nobody(climb: Climb) -> None:
    runner = FakeRunner()
    made = runner._run

    def damaged(verb: str, config: RunConfig, slower: float, *more: Any) -> Attempt:
        attempt = made(verb, config, slower, *more)
        if verb == "profile" and attempt.run is not None:
            (attempt.run / "events.jsonl").write_text("no event\nnor this\n")
        return attempt

    runner._run = damaged  # type: ignore[method-assign]
    (step,) = climb(runner, overrides=ALONE, only=("data_workers",)).document["steps"]
    assert step["predicted"] is None
    assert "cannot be read" in step["no_prediction"]
    assert step["measured"] is not None
