"""``drivetrain ops tune`` and ``ops tuned``: what they print, what they refuse, and their exit codes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drivetrain.cli.application import application
from drivetrain.engine.ops.tuned_file import TunedFile
from drivetrain.engine.ops_tuning import processes
from drivetrain.engine.ops_tuning.processes import Answer
from drivetrain.errors import DrivetrainError

CONFIG = (
    "llama-2m",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=48",
    "model.seq_length=16",
    "model.vocab_size=300",
    "training.micro_batch_size=2",
    "training.global_batch_size=4",
    "data.reset_attention_mask=false",
    "training.eval_iters=0",
    "lr_schedule.lr_warmup_tokens=0",
    "run.device=cpu",
    "run.num_threads=1",
)


@pytest.fixture(autouse=True)
def _answered_without_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "cache"))

    def answer(self: object, request: Mapping[str, Any], *, limit_s: float) -> Answer:
        if request["do"] == "time":
            seconds = {name: [1.0 if name == "eager" else 0.5] * 7 for name in request["backends"]}
            return Answer({"seconds": seconds, "problems": {}}, None, False, 0.1)
        problems = ["output 0 is wrong"] if request["call"]["operator"] == "glu" else []
        return Answer({"problems": problems, "measured": [], "peak_bytes": None}, None, False, 0.1)

    monkeypatch.setattr(processes.Children, "__call__", answer)


def answer(*arguments: str) -> Any:
    return CliRunner().invoke(application(), ["ops", *arguments])


def test_each_call_is_shown_with_its_choice_and_what_it_brings(tmp_path: Path) -> None:
    file = tmp_path / "tuned.toml"
    result = answer("tune", *CONFIG, "--operator", "rotary", "--operator", "linear", "--output", str(file))
    assert result.exit_code == 0, result.output
    assert "2.00x" in result.stdout
    assert "transposed_gradient" in result.stdout or "inductor" in result.stdout
    assert f"written: {file}" in result.stdout
    # Eager takes a second a call, all others half of it: 2 micro-batches, 2 layers, 2 rotations and 2 products each.
    assert "as chosen 8,000.0, eager 16,000.0, " in result.stdout
    assert file.exists()


def test_the_document_is_the_only_thing_on_stdout_and_says_how_each_call_ended(tmp_path: Path) -> None:
    file = tmp_path / "tuned.toml"
    result = answer("tune", *CONFIG, "--output", str(file), "--json")
    assert result.exit_code == 1  # no backend of glu is right
    document = json.loads(result.stdout)
    assert document["path"] == str(file)
    assert not document["complete"]
    status = {one["operator"]: one["status"] for one in document["calls"]}
    assert status.pop("glu") == "failed"
    assert set(status.values()) == {"tuned"}
    assert {"attention", "rotary", "qkv_product", "linear_cross_entropy", "add_rms_norm"} <= set(status)
    totals = document["seconds_per_step"]
    assert totals["as chosen"] == totals["eager"] / 2
    assert totals["eager"] > totals["inductor"] > totals["as chosen"]
    attention = next(one for one in document["calls"] if one["operator"] == "attention")
    assert attention["ratio_to_eager"] == 2.0
    assert attention["calls_per_step"] == 4.0


def test_the_default_file_is_the_one_that_runs_read_and_it_is_valid_here() -> None:
    assert answer("tune", *CONFIG, "--operator", "linear").exit_code == 0
    result = answer("tuned", "--threads", "1", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["valid"]
    assert document["environment"]["threads"] == "1"
    assert {one["operator"] for one in document["entries"]} == {"linear"}
    assert document["hash"] == TunedFile.read(document["path"]).hash


def test_a_file_for_other_threads_is_shown_and_said_not_to_be_valid() -> None:
    answer("tune", *CONFIG, "--operator", "linear")
    result = answer("tuned", "--threads", "3")
    assert result.exit_code == 1
    assert "threads: 1 there, 3 here" in result.stdout
    assert "valid here" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tune", "lama-2m"], "llama-2m"),
        (["tune", *CONFIG, "--budget", "soon"], "--budget 'soon' is no duration"),
        (["tune", *CONFIG, "--budget", "0s"], "too small"),
        (
            ["tune", *CONFIG, "--operator", "glue"],
            "--operator glue: no model asks for it; those that one can: rms_norm",
        ),
        (["tune", *CONFIG, "training.global_batch_size=3"], "global_batch_size"),
        (
            ["tune", *CONFIG, "--operator", "rms_norm", "parallelism.tensor_model_parallel_size=2"],
            "tensor_model_parallel_size=1",
        ),
        (["tuned", "none.toml"], "drivetrain ops tune CONFIG --output none.toml"),
    ],
)
def test_bad_input_is_one_message(arguments: list[str], said: str) -> None:
    error = answer(*arguments).exception
    assert isinstance(error, DrivetrainError)
    assert said in str(error)
