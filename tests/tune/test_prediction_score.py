"""A prediction is held against the share of a step that its trial saved."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.errors import RunError
from drivetrain.tune.prediction_score import score_folder, score_of_step, score_of_steps


def step(predicted: float | None, measured: float | None, **more: Any) -> dict[str, Any]:
    return {
        "entry": "bf16",
        "predicted": None if predicted is None else {"ratio": predicted, "rule": "said so"},
        "measured": None
        if measured is None
        else {"ratio": measured, "low": measured - 0.01, "high": measured + 0.01},
        "least_effect": 0.01,
        **more,
    }


def test_the_error_is_of_the_saved_share_of_a_step() -> None:
    # Half of a step was expected to go, and a third went: a half too much.
    score = score_of_step(step(2.0, 1.5))
    assert score is not None
    assert score["error"] == pytest.approx((1 / 2 - 1 / 3) / (1 / 3))
    # A cost is a negative share: a tenth was expected to come on top, and a fifth did.
    cost = score_of_step(step(1 / 1.1, 1 / 1.2))
    assert cost is not None
    assert cost["error"] == pytest.approx(0.1 / 0.2)


def test_a_change_below_the_least_effect_divides_by_that_effect() -> None:
    score = score_of_step(step(1.01, 1.0001, least_effect=0.02))
    assert score is not None
    assert score["error"] == pytest.approx(((1 - 1 / 1.01) - (1 - 1 / 1.0001)) / (1 - 1 / 1.02))


@given(st.floats(0.2, 20.0), st.floats(0.2, 20.0))
def test_an_error_is_none_only_where_both_agree(predicted: float, measured: float) -> None:
    score = score_of_step(step(predicted, measured))
    assert score is not None
    assert score["error"] >= 0
    assert (score["error"] == 0) == (1 / predicted == 1 / measured)


def test_nothing_is_scored_where_one_of_the_two_is_missing() -> None:
    assert score_of_step(step(None, 1.2)) is None
    assert score_of_step(step(1.2, None)) is None
    found = score_of_steps([step(None, 1.2), step(1.2, None), step(1.2, 1.2)])
    assert (found.measured, found.predicted, found.median_error) == (2, 1, 0.0)


def test_intervals_and_ranges_are_counted_of_those_that_have_them() -> None:
    ranged = step(1.3, 1.2)
    ranged["predicted"] |= {"low": 1.1, "high": 1.4}
    narrow = step(1.3, 1.2)
    narrow["predicted"] |= {"low": 1.25, "high": 1.4}
    found = score_of_steps([ranged, narrow, step(1.205, 1.2)])
    assert (found.predicted, found.within_interval, found.within_range, found.ranged) == (3, 1, 1, 2)
    assert found.median_error == score_of_step(ranged)["error"]  # type: ignore[index]


def test_a_prediction_is_held_against_what_it_is_of() -> None:
    # Memory was the goal: its ratio is of bytes, and that of speed stands beside it.
    bytes_saved = step(1.5, 3.0, speed={"ratio": 1.5, "low": 1.4, "high": 1.6})
    found = score_of_step(bytes_saved, "memory")
    assert found is not None
    assert found["error"] == 0
    assert score_of_step(step(1.5, 3.0), "memory") is None
    effective = step(1.3, 1.3)
    effective["predicted"] |= {"of": "effective_tokens"}
    assert score_of_step(effective) is None, "the trial counted padding, too"
    assert score_of_step(effective, "effective_tokens")["error"] == 0  # type: ignore[index]


def tune(folder: Path, name: str, steps: list[dict[str, Any]]) -> None:
    (folder / name).mkdir(parents=True)
    document = {"schema": 1, "tune": name, "status": "finished", "steps": steps, "settings": {}}
    (folder / name / "tune.json").write_text(json.dumps(document))


def test_the_tunes_of_a_folder_are_scored_by_entry(tmp_path: Path) -> None:
    tune(tmp_path, "20261201-a", [step(2.0, 1.5), step(1.1, 1.1, entry="compile")])
    move = step(None, 1.3, entry="recompute", move="larger_batch")
    tune(tmp_path, "20261202-b", [step(1.5, 1.5), move])
    (tmp_path / "20261203-c").mkdir()
    (tmp_path / "20261203-c" / "tune.json").write_text("{")
    found = score_folder(tmp_path)
    assert found.tunes == 2
    assert len(found.passed_over) == 1
    assert "20261203-c" in found.passed_over[0]
    assert list(found.entries) == ["bf16", "compile", "recompute:larger_batch"]
    assert found.entries["bf16"].median_error == pytest.approx((0.5 + 0.0) / 2)
    assert (found.entries["recompute:larger_batch"].measured, found.whole.measured) == (1, 4)
    assert found.entries["recompute:larger_batch"].median_error is None
    assert found.whole.median_error == 0.0
    json.dumps(found.to_document())


def test_a_folder_without_tunes_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no tunes"):
        score_folder(tmp_path)
