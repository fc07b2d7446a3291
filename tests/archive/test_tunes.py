"""Tunes on disk: found by what a user calls them, damaged ones named, held by one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.tunes import create_tune, find_tune, hold_tune, list_tunes, open_tune, save_tune
from drivetrain.errors import RunError

DOCUMENT: dict[str, Any] = {"status": "running", "steps": [], "settings": {}}


def made(tunes: Path, name: str = "llama-2m") -> Path:
    return create_tune(tunes, name, lambda tune, _folder: {"tune": tune, **DOCUMENT})


def test_a_new_tune_has_its_folders_and_its_document(tmp_path: Path) -> None:
    path = made(tmp_path / "tunes", "my tune/1")
    assert path.name.endswith(path.name[-4:])
    assert "my-tune-1" in path.name
    assert {entry.name for entry in path.iterdir()} == {"configs", "runs", "logs", "tune.json"}
    assert open_tune(path).id == path.name


def test_a_tune_answers_to_its_path_its_id_and_unique_parts_of_it(tmp_path: Path) -> None:
    first, second = made(tmp_path, "first"), made(tmp_path, "second")
    assert open_tune(first.name, tmp_path).path == first
    assert open_tune(second).path == second
    assert find_tune(second.name[-8:], tmp_path) == second
    assert list_tunes(tmp_path) == sorted([first, second])
    assert find_tune("latest", tmp_path) == list_tunes(tmp_path)[-1]
    with pytest.raises(RunError, match="ambiguous"):
        find_tune(first.name[:8], tmp_path)


def test_what_is_no_tune_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = made(tmp_path)
    with pytest.raises(RunError, match=f"no tune 'llama-9m'.*{path.name}"):
        open_tune("llama-9m", tmp_path)
    with pytest.raises(RunError, match="there are none"):
        open_tune("x", tmp_path / "nowhere")
    assert find_tune("", tmp_path) is None
    assert find_tune("x" * 5000, tmp_path) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"tune": "x"}', "no schema number"),
        ('{"schema": 99, "tune": "x"}', "schema 99.*upgrade"),
        ('{"schema": 1, "tune": "x", "status": "running", "settings": {}}', "'steps' is missing"),
        ('{"schema": 1, "tune": "x", "status": "odd", "settings": {}, "steps": []}', "'odd' is none of"),
    ],
)
def test_a_damaged_document_is_said(tmp_path: Path, text: str, message: str) -> None:
    path = made(tmp_path)
    (path / "tune.json").write_text(text)
    with pytest.raises(RunError, match=message):
        open_tune(path)


def test_numbers_that_json_does_not_have_come_back(tmp_path: Path) -> None:
    path = made(tmp_path)
    save_tune(path, {**open_tune(path).document, "speed_up": {"high": float("inf")}})
    assert json.loads((path / "tune.json").read_text())["speed_up"] == {"high": "Infinity"}
    assert open_tune(path).document["speed_up"] == {"high": float("inf")}


def test_a_running_tune_whose_process_is_gone_is_lost(tmp_path: Path) -> None:
    path = made(tmp_path)
    assert open_tune(path).status() == "lost"
    with hold_tune(path):
        assert open_tune(path).status() == "running"
        with pytest.raises(RunError, match="another process"), hold_tune(path):
            pass
    assert open_tune(path).status() == "lost"
    save_tune(path, {**open_tune(path).document, "status": "finished"})
    assert open_tune(path).status() == "finished"


def test_nothing_is_left_of_a_tune_that_could_not_be_made(tmp_path: Path) -> None:
    def fail(_tune: str, _folder: Path) -> dict[str, Any]:
        raise RunError("no")

    with pytest.raises(RunError):
        create_tune(tmp_path / "tunes", "x", fail)
    assert list((tmp_path / "tunes").iterdir()) == []
