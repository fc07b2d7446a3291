"""``drivetrain config import``: what it prints and writes, and its exit codes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from drivetrain.catalogue.rules import all_rules
from drivetrain.cli import config
from drivetrain.config import LaunchFacts, load_config, violations
from drivetrain.errors import DrivetrainError
from forkserver import run_drivetrain

ARGUMENTS = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 2 --global-batch-size 16 --train-iters 100 --lr 1e-3 --vocab-size 1000 --bf16
--data-path corpus/books --split 98,2 --tensorboard-dir tb --no-gradient-accumulation-fusion
"""


def run(*arguments: str) -> Result:
    app = typer.Typer(rich_markup_mode=None)
    app.callback()(lambda: None)
    config.register(app)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def refusal(*arguments: str) -> str:
    with pytest.raises(DrivetrainError) as caught:
        run(*arguments)
    return str(caught.value)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.sh"
    file.write_text(ARGUMENTS)
    return file


def test_what_is_written_passes_check(script: Path, tmp_path: Path) -> None:
    target = tmp_path / "ours.toml"
    result = run("config", "import", str(script), "--output", str(target))
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert load_config(str(target)).config.model.num_layers == 2
    checked = run_drivetrain(["check", str(target)], tmp_path, dict(os.environ), timeout=300)
    assert checked.returncode == 0, checked.stderr


def test_every_list_is_shown_beside_the_configuration(script: Path) -> None:
    result = run("config", "import", str(script))
    assert result.exit_code == 0
    assert "[model]\n" in result.stdout
    for line in (
        "--num-layers 2 -> model.num_layers = 2 (the same number)",
        "--bf16 -> precision.params_dtype = bf16",
        "--hidden-dropout -> model.hidden_dropout = 0.1",
        "--tensorboard-dir tb: what a run records",
        "--no-gradient-accumulation-fusion: ",
        "changes speed alone",
    ):
        assert line in result.stderr, line


def test_what_a_file_holds_does_nothing_to_a_terminal(script: Path) -> None:
    script.write_text(f"{ARGUMENTS.strip()} --tensorboard-dir \x1b[2Jx --\x07bell\n".replace("\n", " "))
    result = run("config", "import", str(script), "--allow-missing")
    assert "\x1b" not in result.stderr
    assert "?[2Jx" in result.stderr


def test_the_document_has_the_four_lists(script: Path) -> None:
    result = run("config", "import", str(script), "--json")
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["trainer"] == "megatron"
    assert set(document["taken"][0]) == {"name", "given", "field", "value", "rule"}
    assert [one["name"] for one in document["not_supported"]] == ["--no-gradient-accumulation-fusion"]
    assert document["not_supported"][0]["effect"] == "speed"
    assert document["unknown"] == []
    assert not document["changes_training"]
    assert document["written"] is None
    assert "num_layers = 2" in document["toml"]


def test_what_changes_the_training_is_not_written_unless_it_is_allowed(script: Path, tmp_path: Path) -> None:
    script.write_text(f"{ARGUMENTS} --num-experts 8 --frobnicate")
    target = tmp_path / "ours.toml"
    result = run("config", "import", str(script), "--output", str(target))
    assert result.exit_code == 1
    assert not target.exists()
    assert "--num-experts 8: mixture of experts is not built" in result.stderr
    assert "changes another curve" in result.stderr
    assert "--frobnicate: no argument of Megatron-LM that is known here" in result.stderr
    assert run("config", "import", str(script)).stdout == ""
    allowed = run("config", "import", str(script), "--output", str(target), "--allow-missing")
    assert allowed.exit_code == 0
    text = target.read_text()
    assert "# not supported (curve): --num-experts 8" in text
    assert "# unknown: --frobnicate" in text
    assert violations(load_config(str(target)).config, LaunchFacts(), all_rules()) == []


def test_a_file_that_is_there_is_kept_unless_told_otherwise(script: Path, tmp_path: Path) -> None:
    target = tmp_path / "ours.toml"
    target.write_text("mine")
    assert "is there already" in refusal("config", "import", str(script), "--output", str(target))
    assert target.read_text() == "mine"
    assert run("config", "import", str(script), "--output", str(target), "--overwrite").exit_code == 0
    assert "num_layers = 2" in target.read_text()
    assert "does not exist" in refusal(
        "config", "import", str(script), "--output", str(tmp_path / "no" / "a.toml")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "megatrn"], "did you mean megatron"),
        (["--set", "N"], "expected NAME=VALUE"),
        (["--set", "a b=1"], "expected NAME=VALUE"),
        (["--from", "torchtitan"], "is no valid TOML"),
        (["model.layers=3"], "model.layers"),
        (["model.num_attention_heads=5"], "--hidden-size"),
    ],
)
def test_wrong_options_have_one_message(script: Path, options: list[str], message: str) -> None:
    assert message in refusal("config", "import", str(script), *options)


def test_a_hostile_value_ends_no_comment_and_starts_no_field(script: Path, tmp_path: Path) -> None:
    script.write_text(
        ARGUMENTS + " --tokenizer-model 'x.json' --wandb-project $'a\\nhidden_size = 1' --spec 'a\n[model]'"
    )
    target = tmp_path / "ours.toml"
    assert run("config", "import", str(script), "--output", str(target), "--allow-missing").exit_code == 0
    assert load_config(str(target)).config.model.hidden_size == 64
