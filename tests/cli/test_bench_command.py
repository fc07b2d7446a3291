"""``drivetrain bench``: durations, what is printed and stored, an interruption. No time is asserted."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from drivetrain.cli import bench
from drivetrain.cli.bench import parse_duration
from drivetrain.engine import ceilings
from drivetrain.engine.ceilings import MatmulShape, Progress
from drivetrain.errors import DrivetrainError
from drivetrain.measure.ceilings import load_ceilings


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> typer.Typer:
    """The verb alone, with small candidates and a cache of its own."""
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(ceilings, "CPU_SHAPES", (MatmulShape(32, 32, 32),))
    monkeypatch.setattr(ceilings, "_SEARCH_SECONDS", 0.005)
    monkeypatch.setattr(ceilings, "_array_bytes", lambda device: 2**16)
    app = typer.Typer()
    app.callback()(lambda: None)
    bench.register(app)
    return app


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20", 20),
        ("20s", 20),
        ("5m", 300),
        ("300s", 300),
        ("1.5m", 90),
        (" 0.2s ", 0.2),
        (".5", 0.5),
        ("1h", 3600),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "0", "-1", "20 minutes", "5d", "1e3", "nan", "inf", "2d", "25h", "20ss"]
)
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(DrivetrainError, match="5m"):
        parse_duration(text)


def test_gemm_measures_stores_and_prints(app: typer.Typer, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["bench", "gemm", "--sustain", "0.02s", "--threads", "1", "--device", "cpu"]
    )
    assert done.exit_code == 0, done.output
    assert {(one.kind, one.dtype, one.num_threads) for one in load_ceilings().entries} == {
        ("matmul", "bf16", 1),
        ("matmul", "fp32", 1),
    }
    assert "TFLOP/s" in done.stdout
    assert "32x32x32" in done.stdout
    assert str(tmp_path) in done.stdout
    assert "search" in done.stderr
    assert "sustain" in done.stderr


def test_json_is_one_document_and_progress_stays_on_stderr(app: typer.Typer) -> None:
    arguments = [
        "bench",
        "gemm",
        "--sustain",
        "0.02",
        "--dtype",
        "fp32",
        "--threads",
        "1",
        "--device",
        "cpu",
        "--json",
    ]
    done = CliRunner().invoke(app, arguments)
    document = json.loads(done.stdout)
    (ceiling,) = document["ceilings"]
    assert (ceiling["kind"], ceiling["dtype"], ceiling["unit"]) == ("matmul", "fp32", "FLOP/s")
    assert ceiling["value"] == load_ceilings().entries[0].value
    assert ceiling["stored"] is True
    assert ceiling["former_value"] is None
    assert "drivetrain" in ceiling["command"]
    again = json.loads(CliRunner().invoke(app, [*arguments, "--force"]).stdout)["ceilings"][0]
    assert again["former_value"] == ceiling["value"]


def test_a_dtype_given_twice_is_measured_once(app: typer.Typer) -> None:
    arguments = [
        "bench",
        "gemm",
        "--sustain",
        "0.02",
        "--dtype",
        "fp32",
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--json",
    ]
    assert len(json.loads(CliRunner().invoke(app, arguments).stdout)["ceilings"]) == 1


def test_memory_measures_bytes(app: typer.Typer) -> None:
    done = CliRunner().invoke(
        app, ["bench", "memory", "--sustain", "0.02", "--threads", "1", "--device", "cpu"]
    )
    assert done.exit_code == 0, done.output
    assert "GB/s" in done.stdout
    (entry,) = load_ceilings().entries
    assert (entry.kind, entry.unit) == ("memory", "B/s")


def test_an_interruption_stores_nothing_and_exits_with_130(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, progress: Progress) -> None:
        if progress.phase == "sustain":
            raise KeyboardInterrupt

    monkeypatch.setattr(bench._ProgressLine, "__call__", interrupt)
    done = CliRunner().invoke(app, ["bench", "gemm", "--sustain", "5m", "--dtype", "fp32", "--device", "cpu"])
    assert done.exit_code == 130
    assert "interrupted: 0 of 1" in done.stderr
    assert load_ceilings().entries == ()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "int3"], "bf16, fp16, fp32"),
        (["--device", "tpu"], "auto, cpu, cuda"),
        (["--sustain", "soon"], "5m"),
    ],
)
def test_bad_input_is_an_error_before_anything_runs(
    app: typer.Typer, arguments: list[str], said: str
) -> None:
    done = CliRunner().invoke(app, ["bench", "gemm", *arguments])
    assert isinstance(done.exception, DrivetrainError)
    assert said in str(done.exception)


def test_a_disturbed_measurement_is_announced(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["bench", "gemm", "--sustain", "0.02", "--dtype", "fp32", "--threads", "1", "--device", "cpu"]
    # Processor time stands still: as if others had the core.
    monkeypatch.setattr(ceilings.time, "process_time", lambda: 0.0)
    done = CliRunner().invoke(app, arguments)
    assert "warning: matmul fp32: got only 0% of its cores" in done.stderr
    assert "idle machine" in done.stderr
