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
from drivetrain.errors import RunError

Invoke = Callable[..., Result]


def make_run(
    runs_dir: Path, name: str, *, lr: str = "1e-3", torch: str = "2.13.0", speed: float = 100.0
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


def test_help_has_an_example(invoke: Invoke) -> None:
    assert "Example: drivetrain compare" in invoke("--help").stdout
