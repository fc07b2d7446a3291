"""``check`` of operators: backends that cannot serve, and what the tuned file has; ``train`` refuses too."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drivetrain.cli.application import application
from drivetrain.engine.ops.tuned_file import Entry, TunedFile, environment_here
from drivetrain.engine.ops_tuning.writing import write_tuned
from drivetrain.errors import DrivetrainError
from runs_on_the_spot import Tiny

SMALL = (
    "llama-2m",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=48",
    "model.seq_length=16",
    "model.vocab_size=300",
    "training.micro_batch_size=2",
    "training.global_batch_size=4",
    "lr_schedule.lr_warmup_tokens=0",
    "run.device=cpu",
    "run.num_threads=1",
)


@pytest.fixture(autouse=True)
def _nothing_was_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "cache"))


def check(*arguments: str) -> Any:
    return CliRunner().invoke(application(), ["check", *SMALL, *arguments])


def document(*arguments: str, exit_code: int = 0) -> dict[str, Any]:
    done = check(*arguments, "--json")
    assert done.exit_code == exit_code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def here(**other: str) -> dict[str, str]:
    from drivetrain.config import RunSectionConfig
    from drivetrain.engine.devices import select_device

    return {**environment_here(select_device(RunSectionConfig(device="cpu")), 1), **other}


def tuned_file(folder: Path, environment: dict[str, str], operators: tuple[str, ...]) -> Path:
    """A file that has ``eager`` for each call of these operators that ``check`` says to be untuned."""
    from drivetrain.engine.ops._operator_code import operator_code

    path = folder / "ops.tuned.toml"
    write_tuned(path, here(), ())
    asked = document("fusion.level=all", f"fusion.tuned_file={path}")["operators"]["tuned_file"]["calls"]
    entries = [
        Entry(
            operator=one["operator"],
            call=one["call"],
            tokens=one["tokens"],
            code=operator_code(f"drivetrain.engine.ops.{one['operator']}"),
            backend="eager",
            calls_per_step=1.0,
        )
        for one in asked
        if one["operator"] in operators
    ]
    assert entries
    write_tuned(path, environment, entries)
    return path


def test_backends_that_cannot_serve_are_broken_rules_of_their_own() -> None:
    found = document("fusion.attention=flash_attn", "fusion.glu=triton", exit_code=1)
    assert not found["accepted"]
    assert [one["fields"] for one in found["violations"]] == [["fusion.attention"], ["fusion.glu"]]
    assert "those that can: eager" in found["violations"][0]["message"]
    text = check("fusion.glu=triton")
    assert text.exit_code == 1
    assert "named-backend-serves: fusion.glu = triton: triton cannot serve" in text.stdout
    assert document("fusion.glu=triton", "fusion.allow_fallback=true")["accepted"]
    dry = check("fusion.glu=triton", "--dry-run")
    assert isinstance(dry.exception, DrivetrainError)


def test_without_operators_nothing_is_looked_at() -> None:
    assert document()["operators"] is None
    assert "tuned file" not in check().stdout


def test_a_gpu_that_is_not_here_is_no_reason_to_refuse() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    found = document("fusion.attention=flash_attn", "run.device=cuda")
    assert found["accepted"]
    assert "run.device=cuda" in found["operators"]["not_looked_at"]
    assert "were not looked at" in check("fusion.attention=flash_attn", "run.device=cuda").stdout


def test_a_missing_file_is_said_and_one_that_is_named_and_missing_is_refused(tmp_path: Path) -> None:
    found = document("fusion.level=core")["operators"]["tuned_file"]
    assert (found["status"], found["served"]) == ("missing", 0)
    assert "tuned file: there is none" in check("fusion.level=core").stdout
    absent = document("fusion.level=core", f"fusion.tuned_file={tmp_path / 'absent.toml'}", exit_code=1)
    (violation,) = absent["violations"]
    assert (violation["rule"], violation["fields"]) == ("tuned-file-is-usable", ["fusion.tuned_file"])
    # No operator is auto: nobody reads it.
    assert document("fusion.glu=eager", f"fusion.tuned_file={tmp_path / 'absent.toml'}")["accepted"]


def test_what_the_file_serves_and_what_it_misses_is_counted_by_kind_of_call(tmp_path: Path) -> None:
    path = tuned_file(tmp_path, here(), ("glu", "attention"))
    named = f"fusion.tuned_file={path}"
    found = document("fusion.level=all", named)["operators"]["tuned_file"]
    assert (found["status"], found["entries"], found["stale"]) == ("used", found["served"], 0)
    assert found["sha256"] == TunedFile.read(path).hash
    by_operator: dict[str, set[bool]] = {}
    for one in found["calls"]:
        by_operator.setdefault(one["operator"], set()).add(one["tuned"])
        assert not one["tuned"] or one["backend"] == "eager"
    assert by_operator.pop("glu") == by_operator.pop("attention") == {True}
    assert set(map(tuple, by_operator.values())) == {(False,)}
    # Training and evaluation; attention of whole sequences and of packed documents in each.
    attention = [one for one in found["calls"] if one["operator"] == "attention"]
    assert [one["gradients"] for one in attention].count(True) == 2
    assert len(attention) == 4
    text = check("fusion.level=all", named).stdout
    assert f"has the choice of {found['served']} of {len(found['calls'])} kinds of calls" in text
    assert "not tuned: linear" in text
    # An operator that is named is not looked up.
    fewer = document("fusion.level=core", "fusion.attention=eager", named)["operators"]["tuned_file"]
    assert "attention" not in {one["operator"] for one in fewer["calls"]}


def test_a_file_of_another_machine_or_of_other_code_is_said_not_to_be_used(tmp_path: Path) -> None:
    path = tuned_file(tmp_path, here(torch="1.0"), ("glu",))
    named = f"fusion.tuned_file={path}"
    found = document("fusion.level=core", named)["operators"]["tuned_file"]
    assert (found["status"], found["served"]) == ("not used", 0)
    assert "torch: 1.0 there" in check("fusion.level=core", named).stdout
    path = tuned_file(tmp_path, here(), ("glu",))
    text = path.read_text()
    code = text.partition('code = "')[2][:16]
    path.write_text(text.replace(code, "0" * 16))
    found = document("fusion.level=core", named)["operators"]["tuned_file"]
    assert (found["status"], found["served"]) == ("used", 0)
    assert found["stale"] == found["entries"] > 0
    assert "glu has other code now" in check("fusion.level=core", named).stdout


def test_calls_of_layers_that_are_cut_are_said_to_be_unknown(tmp_path: Path) -> None:
    path = tuned_file(tmp_path, here(), ("glu",))
    found = document(
        "fusion.level=core",
        f"fusion.tuned_file={path}",
        "parallelism.tensor_model_parallel_size=2",
    )["operators"]["tuned_file"]
    assert (found["calls"], found["served"]) == (None, None)
    assert "tensor-parallel" in found["unknown"]


def test_train_refuses_a_backend_that_cannot_serve_and_leaves_no_run(tiny: Tiny) -> None:
    done = tiny.run("train", str(tiny.file), "fusion.attention=flash_attn", "--nproc", "2")
    assert done.returncode == 2
    assert "fusion.attention = flash_attn: flash_attn cannot serve" in done.stderr
    assert "Traceback" not in done.stderr
    assert not tiny.runs.exists() or not list(tiny.runs.iterdir())
