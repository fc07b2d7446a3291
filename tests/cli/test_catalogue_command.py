"""``drivetrain catalogue``: all entries, one entry, the document, a wrong name."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from drivetrain.catalogue import catalogue
from drivetrain.cli.application import application
from drivetrain.errors import DrivetrainError


def answer(*arguments: str) -> Any:
    return CliRunner().invoke(application(), ["catalogue", *arguments])


def test_the_document_holds_each_entry_with_the_keys_of_the_contract() -> None:
    document = json.loads(answer("--json").stdout)
    assert document.keys() == {"optimisations"}
    assert [one["name"] for one in document["optimisations"]] == [one.name for one in catalogue()]
    for one in document["optimisations"]:
        assert one.keys() >= {"name", "field", "numerics", "treats", "knobs", "requires", "conflicts"}


def test_the_list_names_each_entry_with_field_numerics_and_classes() -> None:
    text = answer().stdout
    for one in catalogue():
        assert one.field in text
        assert ", ".join(one.treats) in text


def test_one_entry_is_shown_with_everything_about_it() -> None:
    text = answer("data_workers").stdout
    assert "data.num_workers from 1 to 16 (whole numbers)" in text
    assert "building goes on beside the step" in text
    assert "none is predicted: at what rate" in answer("optimizer_offload").stdout
    (one,) = json.loads(answer("data_workers", "--json").stdout)["optimisations"]
    assert one["name"] == "data_workers"


def test_a_wrong_name_is_refused_with_the_nearest() -> None:
    result = answer("ddp_buckets")
    assert isinstance(result.exception, DrivetrainError)
    assert "did you mean ddp_bucket?" in str(result.exception)


def test_scores_say_how_far_the_predictions_of_a_folder_were_off(tmp_path: Path) -> None:
    steps = [
        {
            "entry": entry,
            "predicted": {"ratio": ratio, "rule": ""},
            "measured": {"ratio": 1.25, "low": 1.2, "high": 1.3},
            "least_effect": 0.01,
        }
        for entry, ratio in (("bf16", 1.25), ("compile", 1.5))
    ]
    (tmp_path / "one").mkdir()
    document = {"schema": 1, "tune": "one", "status": "finished", "steps": steps, "settings": {}}
    (tmp_path / "one" / "tune.json").write_text(json.dumps(document))
    text = answer("--scores", str(tmp_path)).stdout
    # A fifth of a step was saved; a third had been expected of compile: two thirds too much.
    assert "1 tunes in" in text
    assert "median error 33%, 2 of 2 measured steps predicted, 1 within the trial's interval" in text
    found = json.loads(answer("compile", "--scores", str(tmp_path), "--json").stdout)
    assert list(found["entries"]) == ["compile"]
    assert abs(found["score"]["median_error"] - 2 / 3) < 1e-9
    empty = answer("--scores", str(tmp_path / "none"))
    assert isinstance(empty.exception, DrivetrainError)
    assert "holds no tunes" in str(empty.exception)
