"""``drivetrain runs list | show | tag``."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RunWriter
from drivetrain.cli import runs
from drivetrain.config import load_config, to_toml
from drivetrain.errors import RunError

Invoke = Callable[..., Result]


def make_run(runs_dir: Path, name: str = "llama-2m") -> RunWriter:
    manifest = {
        "config_hash": "0" * 64,
        "layout": {"data_parallel_size": 1, "world_size": 1},
        "provenance": {
            "command": ["drivetrain", "train", name],
            "git": {"commit": "1" * 40, "branch": "main", "dirty": True},
            "packages": {"torch": "2.13.0", "triton": None},
            "host": "somewhere",
        },
        "devices": {"type": "cpu", "name": "a processor", "count": 1},
        "dataset": {"fingerprint": "abc"},
        "seed": 1234,
    }
    config = load_config("llama-2m", ("training.train_iters=40",)).config
    return RunWriter.create(runs_dir, name, config_toml=to_toml(config), manifest=manifest)


def train(writer: RunWriter, steps: int = 3, loss: float = 2.5) -> None:
    writer.open_segment(1)
    writer.event("start", step=0)
    for step in range(1, steps + 1):
        values = {
            "train/loss": loss,
            "time/step_s": 1.0,
            "throughput/tokens_per_sec": 1000.0 * step,
            "throughput/device/mfu": 0.25,
        }
        writer.log_metrics(step, values, ("evaluation",) if step == steps else ())


@pytest.fixture
def invoke() -> Invoke:
    app = typer.Typer()
    runs.register(app)
    app.command("other")(lambda: None)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, ["runs", *map(str, arguments)], catch_exceptions=False)

    return run


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def test_a_folder_without_runs_is_an_empty_list(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("list", "--runs-dir", tmp_path / "none")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no runs in" in result.stderr
    listed = document(invoke("list", "--runs-dir", tmp_path / "none", "--json"))
    assert listed == {"schema": 1, "runs": [], "unreadable": []}


def test_the_list_has_a_row_a_run_uncut_in_a_pipe(invoke: Invoke, tmp_path: Path) -> None:
    name = "a-rather-long-name-that-would-not-fit-into-eighty-columns"
    writer = make_run(tmp_path, name)
    train(writer)
    writer.event("tag", tag="good[1]", action="add")
    writer.event("end", status="finished", reason=None)
    train_nothing = make_run(tmp_path, "empty")
    heading, *rows = invoke("list", "--runs-dir", tmp_path).stdout.splitlines()
    assert heading.split() == ["run", "status", "step", "loss", "tok/s", "MFU", "tags", "started"]
    row = next(row for row in rows if name in row).split()
    # The speed is that of the last step that did nothing but train.
    assert row[:7] == [writer.path.name, "finished", "3/40", "2.5000", "2,000", "25.0%", "good[1]"]
    empty = next(row for row in rows if "empty" in row).split()
    assert empty[:6] == [train_nothing.path.name, "running", "0/40", "-", "-", "-"]


def test_the_summary_wins_over_the_last_steps(invoke: Invoke, tmp_path: Path) -> None:
    writer = make_run(tmp_path)
    train(writer)
    writer.event("end", status="finished", reason=None)
    writer.write_summary({"final_loss": 1.5, "tokens_per_second": 7.0, "mfu": None})
    (row,) = document(invoke("list", "--runs-dir", tmp_path, "--json"))["runs"]
    assert (row["loss"], row["tokens_per_second"], row["mfu"]) == (1.5, 7.0, 0.25)
    assert (row["step"], row["steps"], row["status"]) == (3, 40, "finished")


def test_a_loss_that_is_not_a_number_is_shown(invoke: Invoke, tmp_path: Path) -> None:
    train(make_run(tmp_path), loss=math.nan)
    assert " nan " in invoke("list", "--runs-dir", tmp_path).stdout
    assert document(invoke("list", "--runs-dir", tmp_path, "--json"))["runs"][0]["loss"] == "NaN"


@pytest.mark.parametrize("file", ["run.json", "config.toml", "events.jsonl"])
def test_a_damaged_run_is_named_and_hides_no_other(invoke: Invoke, tmp_path: Path, file: str) -> None:
    good = make_run(tmp_path)
    bad = make_run(tmp_path, "damaged")
    (bad.path / file).write_bytes(b"{\n{\n")
    result = invoke("list", "--runs-dir", tmp_path)
    assert good.path.name in result.stdout
    assert bad.path.name not in result.stdout
    assert f"{bad.path / file} is damaged" in result.stderr
    listed = document(invoke("list", "--runs-dir", tmp_path, "--json"))
    assert [row["run"] for row in listed["runs"]] == [good.path.name]
    assert len(listed["unreadable"]) == 1


def test_show_tells_configuration_origin_figures_and_events(invoke: Invoke, tmp_path: Path) -> None:
    writer = make_run(tmp_path)
    train(writer)
    writer.event("end", status="failed", reason="a [strange] reason")
    shown = invoke("show", "latest", "--runs-dir", tmp_path).stdout
    for expected in (
        "failed (a [strange] reason), step 3 of 40",
        "drivetrain train llama-2m",
        "111111111111 (main), with changes",
        "torch 2.13.0",
        "1 x a processor",
        "five dimensions, partial, from metrics",
        "compute utilisation",
        "25.0%",
        "train_iters=40",
        "step=0",
        "status=failed",
    ):
        assert expected in shown
    assert "triton" not in shown


def test_show_as_json_is_one_document(invoke: Invoke, tmp_path: Path) -> None:
    writer = make_run(tmp_path)
    train(writer)
    shown = document(invoke("show", writer.path, "--json"))
    assert shown["manifest"]["seed"] == 1234
    assert shown["configuration"]["training"]["train_iters"] == 40
    assert shown["figures"]["final_loss"] == 2.5
    assert shown["segments"] == [{"index": 0, "start_step": 1}]
    assert [event["kind"] for event in shown["events"]] == ["start"]
    assert (shown["partial"], shown["end"]) == (True, None)


def test_show_of_an_unknown_run_is_bad_input(invoke: Invoke, tmp_path: Path) -> None:
    make_run(tmp_path)
    with pytest.raises(RunError, match="no run 'nothing' in"):
        invoke("show", "nothing", "--runs-dir", tmp_path)


def test_tags_are_set_and_removed(invoke: Invoke, tmp_path: Path) -> None:
    path = make_run(tmp_path).path
    options = ("--runs-dir", tmp_path)
    assert invoke("tag", "latest", "baseline", *options).stdout == f"{path.name}: baseline\n"
    invoke("tag", "latest", "baseline", *options)
    tagged = document(invoke("tag", "latest", "v1.0", *options, "--json"))
    assert tagged == {"schema": 1, "run": path.name, "tags": ["baseline", "v1.0"]}
    assert len(open_run(path).events()) == 2  # Setting a tag twice changes nothing.
    invoke("tag", "latest", "baseline", "--remove", *options)
    assert open_run(path).tags() == ["v1.0"]
    assert len(open_run(path).events()) == 3


def test_a_tag_that_is_not_there_cannot_be_removed(invoke: Invoke, tmp_path: Path) -> None:
    make_run(tmp_path)
    invoke("tag", "latest", "good", "--runs-dir", tmp_path)
    with pytest.raises(RunError, match="has no tag 'god'; its tags are: good"):
        invoke("tag", "latest", "god", "--remove", "--runs-dir", tmp_path)


@pytest.mark.parametrize("tag", ["", "two words", "-x", "a" * 65, "a,b"])
def test_a_tag_is_one_word(invoke: Invoke, tmp_path: Path, tag: str) -> None:
    path = make_run(tmp_path).path
    with pytest.raises(RunError, match="cannot be a tag"):
        invoke("tag", "--runs-dir", tmp_path, "--", "latest", tag)
    assert open_run(path).events() == []


@pytest.mark.parametrize("verb", ["list", "show", "tag"])
def test_help_has_an_example(invoke: Invoke, verb: str) -> None:
    assert f"Example: drivetrain runs {verb}" in invoke(verb, "--help").stdout


def test_show_gives_the_rules_that_its_figures_were_counted_by(invoke: Invoke, tmp_path: Path) -> None:
    writer = make_run(tmp_path)
    train(writer)
    rule = {"flops_rule": "matmul + attention", "peak_source": "measured here", "window": [3, 40]}
    writer.write_summary(
        {"status": "finished", "mfu": 0.5, "steps": 40, "mfu_rule": rule, "reasons": {"hfu": "because"}}
    )
    writer.event("end", status="finished", reason=None)
    shown = invoke("show", "latest", "--runs-dir", tmp_path).stdout
    assert "step 40 of 40" in shown
    for expected in ("matmul + attention", "measured here", "[3, 40]", "50.0%", "(because)"):
        assert expected in shown
    assert "None" not in shown


def test_the_latest_of_two_runs_of_one_second_is_the_later_one(invoke: Invoke, tmp_path: Path) -> None:
    for name in ("z", "y", "x", "w"):
        time.sleep(0.002)
        make_run(tmp_path, name)
    names = [row["name"] for row in document(invoke("list", "--runs-dir", tmp_path, "--json"))["runs"]]
    assert names == ["z", "y", "x", "w"]
