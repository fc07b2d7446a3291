"""``drivetrain compare RUN RUN...``."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from drivetrain.archive.writer import RunWriter
from drivetrain.cli import compare
from drivetrain.config import load_config, to_toml
from drivetrain.errors import DrivetrainError, RunError
from runs_on_the_spot import Tiny

Invoke = Callable[..., Result]


def make_run(
    runs_dir: Path,
    name: str,
    *,
    lr: str = "1e-3",
    torch: str = "2.13.0",
    speed: float = 100.0,
    steps: int = 0,
) -> Path:
    manifest = {
        "config_hash": "0" * 64,
        "layout": {"data_parallel_size": 1, "world_size": 1},
        "provenance": {"packages": {"torch": torch, "numpy": "2.3.0"}, "host": "somewhere"},
        "devices": {"type": "cpu", "name": "a processor", "count": 1},
        "dataset": {"fingerprint": "abc"},
        "seed": 1234,
    }
    config = load_config("llama-2m", (f"optimizer.lr={lr}",)).config
    with RunWriter.create(runs_dir, name, config_toml=to_toml(config), manifest=manifest) as writer:
        writer.open_segment(1)
        for step in range(1, steps + 1):
            figures = {"progress/tokens": 1024 * step, "train/loss": 5.0, "train/grad_norm": 1.0}
            writer.log_metrics(step, figures, [])
        writer.write_summary({"status": "finished", "tokens_per_second": speed, "tokens": 10, "mfu": None})
        writer.event("end", status="finished", reason=None)
        return writer.path


@pytest.fixture
def invoke() -> Invoke:
    app = typer.Typer()
    compare.register(app)
    app.command("other")(lambda: None)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, ["compare", *map(str, arguments)], catch_exceptions=False)

    return run


def test_runs_stand_side_by_side_with_what_differs(invoke: Invoke, tmp_path: Path) -> None:
    first = make_run(tmp_path, "first")
    second = make_run(tmp_path, "second", lr="2e-3", torch="2.11.0", speed=150.0)
    result = invoke("first", "second", "--runs-dir", tmp_path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"A  {first.name}  (finished)"
    assert lines[1] == f"B  {second.name}  (finished)"
    words = [line.split() for line in lines]
    assert ["dimension", "figure", "A", "B", "B/A"] in words
    assert ["throughput", "tokens/s", "100", "150", "1.500x"] in words
    assert ["compute", "utilisation", "MFU", "-", "-", "-"] in words
    assert ["optimizer.lr", "0.001", "0.002"] in words
    assert ["packages.torch", "2.13.0", "2.11.0"] in words
    assert "numpy" not in result.stdout
    assert "warning" not in result.stdout


def test_equal_runs_differ_in_nothing(invoke: Invoke, tmp_path: Path) -> None:
    make_run(tmp_path, "first")
    make_run(tmp_path, "second")
    output = invoke("first", "second", "--runs-dir", tmp_path).stdout
    assert "configuration: no difference" in output
    assert "environment: no difference" in output


def test_json_is_one_document(invoke: Invoke, tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path, "first"),
        make_run(tmp_path, "second", speed=150.0),
        make_run(tmp_path, "third", lr="2e-3"),
    ]
    result = invoke(*paths, "--json")
    document = json.loads(result.stdout)
    assert [run["run"] for run in document["runs"]] == [str(path) for path in paths]
    speed = next(row for row in document["dimensions"] if row["key"] == "tokens_per_second")
    assert speed == {
        "dimension": "throughput",
        "key": "tokens_per_second",
        "unit": "token/s",
        "better": "higher",
        "values": [100.0, 150.0, 100.0],
        "ratios": [1.0, 1.5, 1.0],
    }
    assert document["configuration"] == {"optimizer.lr": [0.001, 0.001, 0.002]}
    assert document["dataset"] == {"same": True, "fingerprints": ["abc"] * 3}
    assert document["warnings"] == []
    assert document["schema"] == 1


def test_an_unfinished_run_is_marked_partial(invoke: Invoke, tmp_path: Path) -> None:
    make_run(tmp_path, "first")
    second = make_run(tmp_path, "second")
    RunWriter.resume(second).open_segment(2)
    output = invoke("first", "second", "--runs-dir", tmp_path).stdout
    assert f"B  {second.name}  (running, partial)" in output
    assert "warning:" in output


def test_one_run_is_bad_input(invoke: Invoke, tmp_path: Path) -> None:
    make_run(tmp_path, "first")
    with pytest.raises(RunError, match="at least two runs"):
        invoke("first", "--runs-dir", tmp_path)


def test_a_folder_that_is_no_run_is_bad_input(invoke: Invoke, tmp_path: Path) -> None:
    make_run(tmp_path, "first")
    with pytest.raises(RunError, match=r"run\.json is missing"):
        invoke("first", tmp_path, "--runs-dir", tmp_path)


def test_the_gate_answers_by_its_exit_code_and_one_document(invoke: Invoke, tmp_path: Path) -> None:
    first, second = make_run(tmp_path, "first", steps=20), make_run(tmp_path, "second", steps=20)
    result = invoke(first, second, "--gate", "--json")
    document = json.loads(result.stdout)
    assert document.keys() == {"schema", "tier", "verdict", "why", "numbers"}
    assert (result.exit_code, document["tier"], document["verdict"]) == (1, "exact", "inconclusive")
    assert set(document["numbers"]["missing"]) == {"baseline", "candidate"}
    text = invoke(first, second, "--gate").stdout
    assert "verdict   inconclusive" in text
    assert "drivetrain train" in text


def test_runs_of_several_changes_or_environments_are_not_comparable(invoke: Invoke, tmp_path: Path) -> None:
    first = make_run(tmp_path, "first")
    other = make_run(tmp_path, "other", torch="2.11.0")
    result = invoke(first, other, "--gate", "--json")
    assert (result.exit_code, json.loads(result.stdout)["verdict"]) == (2, "not comparable")
    assert "torch 2.13.0 and 2.11.0" in json.loads(result.stdout)["why"]
    file = other / "config.toml"
    file.write_text(
        file.read_text().replace("num_workers = 0", "num_workers = 3").replace("lr = 0.001", "lr = 0.1")
    )
    result = invoke(first, other, "--gate", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["tier"]) == (2, None)
    assert "data.num_workers, optimizer.lr" in document["why"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tier", "exact"], "add --gate"),
        (["--run-missing"], "add --gate"),
        (["--gate", "--tier", "statistic"], "did you mean statistical"),
    ],
)
def test_options_of_the_gate_are_refused_without_it_or_misspelt(
    invoke: Invoke, tmp_path: Path, options: list[str], message: str
) -> None:
    runs = make_run(tmp_path, "first"), make_run(tmp_path, "second")
    with pytest.raises(DrivetrainError, match=message):
        invoke(*runs, *options)


def test_the_gate_takes_two_runs(invoke: Invoke, tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match="3 were given"):
        invoke(*[make_run(tmp_path, name) for name in "abc"], "--gate")


@pytest.mark.long
def test_the_gate_passes_fails_and_makes_what_is_missing_from_the_command_line(tiny: Tiny) -> None:
    settings = ["training.train_iters=20", "training.eval_iters=0", "run.deterministic=true"]
    first = tiny.train(*settings, options=["--probe"])["run"]
    second = tiny.train(*settings, "data.num_workers=1", options=["--parent", Path(first).name])["run"]
    third = tiny.train(*settings, "optimizer.lr=1e-3")["run"]
    lacking = tiny.run("compare", first, second, "--gate")
    assert (lacking.returncode, "--probe" in lacking.stdout) == (1, True)
    made = tiny.run("compare", first, second, "--gate", "--run-missing", "--json")
    assert made.returncode == 0, made.stdout + made.stderr
    assert json.loads(made.stdout)["verdict"] == "pass"
    failed = tiny.run("compare", first, third, "--gate", "--json")
    assert (failed.returncode, json.loads(failed.stdout)["verdict"]) == (1, "fail")


def test_help_has_an_example(invoke: Invoke) -> None:
    assert "Example: drivetrain compare" in invoke("--help").stdout
