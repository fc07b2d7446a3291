"""``benchmarks/gpu.py`` as a command: its dry form, bad input, parts that end badly, and what is written."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import gpu
from gpu_parts.record import DRY
from gpu_parts.report import claims_of, document_of, is_wrong, table
from harness.claims import verdict

SCRIPT = str(Path(gpu.__file__))
DEVICE = {"device": "a device", "torch": "2.11", "cuda": "13.0", "libraries": {"triton": "3.6"}}
HEAD = {"dry": False, "date": "2026-11-30", "command": "python benchmarks/gpu.py", "device": DEVICE}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(SCRIPT).parent), **environment},
    )


def row(
    what: str, backend: str, times: list[float], ours: bool | None = None, verdict: str = "information"
) -> Any:
    return {
        "what": what,
        "backend": backend,
        "said": "said",
        "verdict": verdict,
        "ours": ours,
        "times": times,
        "figures": {},
    }


def part(status: str = "done", rows: Any = (), **given: Any) -> dict[str, Any]:
    return {
        "status": status,
        "rows": list(rows),
        "left_out": [],
        "facts": {"target": 0.85},
        "error": None,
        **given,
    }


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("gpu")
    # A variable that is there for tests of kernels must not slow it down.
    return run(SCRIPT, "--dry", "--json", OUT=str(folder), TRITON_INTERPRET="1"), folder


def test_the_dry_form_runs_every_part(dry: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = dry
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((folder / "gpu.json").read_text())
    assert list(document["parts"]) == list(gpu.PARTS)
    for name, found in document["parts"].items():
        assert found["status"] == "done", (name, found["error"])
        assert found["rows"], name
        assert json.loads((folder / f"{name}.json").read_text())["rows"] == found["rows"]
    assert (folder / "gpu.txt").read_text().strip() in done.stderr


def test_the_dry_form_has_no_figure_that_could_be_taken_for_one(
    dry: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = dry
    document = json.loads(done.stdout)
    assert document["dry"] is True
    assert document["claims"] == []
    rows = [(name, one) for name, found in document["parts"].items() for one in found["rows"]]
    assert all(one["times"] == [] and one["time"] is None for _, one in rows)
    measured = {"bytes", "bytes_per_s", "share_of_copy", "flops_per_s", "tokens_per_s", "mfu", "peak_bytes"}
    assert not any(measured & set(one["figures"]) for _, one in rows)
    assert {one["verdict"] for name, one in rows if name != "numerics"} == {"information", "refused"}
    assert all(
        DRY in one["said"] for name, one in rows if name != "numerics" and one["verdict"] == "information"
    )
    assert DRY in done.stderr


def test_the_dry_form_says_what_it_leaves_out(dry: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    document = json.loads(dry[0].stdout)
    left_out = {name: found["left_out"] for name, found in document["parts"].items()}
    assert "rms_norm, inductor: a dry run compiles nothing" in left_out["bandwidth"]
    assert "fusion.compile=true: a dry run compiles nothing" in left_out["step"]
    assert not any("time was up" in one for said in left_out.values() for one in said)
    served = [one["figures"]["served"] for one in document["parts"]["step"]["rows"]]
    assert served[0] == {}
    assert any("attention/eager" in one for one in served), "operators are asked for"


def test_without_a_device_the_command_says_so_and_names_the_dry_form(tmp_path: Path) -> None:
    done = run(SCRIPT, "--output", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("gpu.py needs a CUDA device: torch ")
    assert "--dry" in line
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seconds", "-3"], "--seconds -3: it is to be a positive number, for example 300"),
        (["--seconds", "nan"], "--seconds nan: it is to be a positive number"),
        (["--seconds", "0"], "--seconds 0: it is to be a positive number"),
        (["--peak", "0"], "a peak of 0.0 FLOP/s"),
    ],
)
def test_bad_numbers_are_refused_before_anything_runs(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--dry", "--output", str(tmp_path / "new"), *arguments]) == 2
    assert capsys.readouterr().err.startswith(said)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert gpu.main(["--dry", "--output", str(tmp_path / "file" / "folder")]) == 2
    assert "give a folder that can be written" in capsys.readouterr().err


PROGRAM = """
import json, os, pathlib, sys, time
import gpu
from gpu_parts.record import Record, Row

def work(name, path, seconds, dry, peak):
    os.setsid()
    record = Record(path, name)
    if name == "loss":
        return
    record.add(Row(name, "eager", "found before", "information"))
    if name == "bandwidth":
        raise SystemExit(7)
    if name == "attention":
        time.sleep(600)
    record.end("done")

gpu.preload = lambda: None
gpu.work, gpu.GRACE_S, gpu.LEAST_S = work, 2.0, 0.0
sys.exit(gpu.main(["--dry", "--seconds", "10", "--output", sys.argv[1]]))
"""


def test_a_part_that_breaks_or_hangs_costs_no_other(tmp_path: Path) -> None:
    done = run("-c", PROGRAM, str(tmp_path))
    assert done.returncode == 1, done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {name: found["status"] for name, found in parts.items()} == {
        "numerics": "done",
        "bandwidth": "failed",
        "loss": "failed",
        "attention": "killed",
        "step": "done",
    }
    assert "ended with 7" in parts["bandwidth"]["error"]
    assert "did not end within" in parts["attention"]["error"]
    kept = {name for name, found in parts.items() if found["rows"]}
    assert kept == {"numerics", "bandwidth", "attention", "step"}
    assert "attention: killed" in done.stdout


LOOKING = """
import sys
import torch

def refuse(*arguments, **options):
    raise AssertionError("the device was asked for")

for name in dir(torch._C):
    if name.startswith("_cuda_") and name != "_cuda_isInBadFork" and callable(getattr(torch._C, name)):
        setattr(torch._C, name, refuse)
torch.cuda.is_available = torch.cuda.device_count = refuse
import gpu
gpu.preload()
assert "gpu_parts.step_part" in sys.modules
"""


def test_nothing_asks_for_the_device_before_the_processes_of_the_parts() -> None:
    """In a process forked from one that has, CUDA cannot be used."""
    done = run("-c", LOOKING)
    assert done.returncode == 0, done.stderr


def test_parts_that_no_time_is_left_for_are_said_and_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "preload", lambda: None)
    monkeypatch.setattr(gpu, "_device", lambda *_, **__: {**DEVICE, "device": "cpu"})
    monkeypatch.setattr(gpu, "_part", lambda *_: pytest.fail("it was started"))
    assert gpu.main(["--dry", "--seconds", "0.1", "--part", "step", "--output", str(tmp_path)]) == 0
    assert "left out: all of it: time was up" in capsys.readouterr().out


def test_only_the_parts_that_were_named_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[str, float]] = []

    def fake(folder: Path, name: str, seconds: float, options: Any) -> Mapping[str, Any]:
        started.append((name, seconds))
        return part()

    monkeypatch.setattr(gpu, "preload", lambda: None)
    monkeypatch.setattr(gpu, "_device", lambda *_, **__: DEVICE)
    monkeypatch.setattr(gpu, "_part", fake)
    arguments = ["--part", "step", "--part", "loss", "--seconds", "100", "--output", str(tmp_path)]
    assert gpu.main(arguments) == 0
    assert [name for name, _ in started] == ["loss", "step"]
    # What a part leaves goes to those behind it.
    assert started[0][1] == pytest.approx(
        100 * gpu.PARTS["loss"] / (gpu.PARTS["loss"] + gpu.PARTS["step"]), rel=0.05
    )
    assert started[1][1] == pytest.approx(100, rel=0.05)
    capsys.readouterr()


def test_the_best_of_ours_is_claimed_against_the_copy_and_told_against_the_others() -> None:
    what = "rms_norm forward"
    rows = [
        row(what, "copy", [0.9, 0.9]),
        row(what, "eager", [3.0, 3.0]),
        row(what, "triton", [1.0, 1.0], ours=True),
        row(what, "other", [2.0, 2.0], ours=True),
        row(what, "liger", [0.8, 0.8], ours=False),
        row("rms_norm", "flash_attn", [], ours=False, verdict="refused"),
    ]
    copy, eager, liger = claims_of({"bandwidth": part(rows=rows)}, DEVICE)
    assert (copy.ratio, copy.target, verdict(copy)) == (pytest.approx(0.9), 0.85, "won")
    assert copy.peer == "a device copy of the same bytes"
    assert (eager.peer, eager.ratio, verdict(eager)) == ("eager", pytest.approx(3.0), "information")
    assert liger.ratio == pytest.approx(0.8)
    assert all("ours is triton" in one.note for one in (copy, eager, liger))


def test_nothing_is_claimed_of_a_dry_run() -> None:
    rows = [row("glu", "copy", [1.0]), row("glu", "triton", [2.0], ours=True)]
    parts = {"bandwidth": part(rows=rows)}
    assert document_of({**HEAD, "dry": True}, parts, ["bandwidth"])["claims"] == []
    assert len(document_of(HEAD, parts, ["bandwidth"])["claims"]) == 1


def test_less_than_the_target_is_lost() -> None:
    rows = [row("glu", "copy", [1.0]), row("glu", "triton", [2.0], ours=True)]
    (claim,) = claims_of({"bandwidth": part(rows=rows)}, DEVICE)
    assert verdict(claim) == "lost"


def test_of_the_loss_the_time_beyond_the_products_is_claimed_against_the_copy() -> None:
    best = {**row("loss", "chunked", [6.0], ours=True), "figures": {"share_of_copy": 0.9}}
    rows = [
        row("loss", "copy", [1.0]),
        row("loss", "three products", [5.0]),
        best,
        row("loss", "eager", [12.0]),
    ]
    copy, eager = claims_of({"loss": part(rows=rows)}, DEVICE)
    assert (copy.ratio, verdict(copy)) == (0.9, "won")
    assert "beyond the three products" in copy.note
    assert (eager.ratio, verdict(eager)) == (2.0, "information")
    # Where nothing lies beyond them there is no share to claim.
    rows[2] = {**best, "figures": {}}
    (eager,) = claims_of({"loss": part(rows=rows)}, DEVICE)
    assert eager.peer == "eager"


@pytest.mark.parametrize(
    "found", [part("failed"), part("killed"), part(rows=[row("a", "b", [], verdict="wrong")])]
)
def test_what_failed_or_was_wrong_shows_in_the_exit_code(found: dict[str, Any]) -> None:
    assert is_wrong(document_of(HEAD, {"numerics": found}, ["numerics"]))
    assert not is_wrong(
        document_of(HEAD, {"numerics": part(rows=[row("a", "b", [], verdict="missed")])}, ["numerics"])
    )


def test_the_table_has_every_row_and_all_that_was_left_out() -> None:
    parts = {
        "numerics": part(
            "failed", [row("rms_norm bf16", "triton", [])], error="Traceback\n  File\nRuntimeError: no"
        ),
        "loss": part(left_out=["inductor: time was up"], seconds=12.0),
    }
    text = table(document_of(HEAD, parts, ["numerics", "loss", "step"]))
    assert "== numerics: failed" in text
    assert "rms_norm bf16  triton  information  said" in text
    assert "RuntimeError: no" in text
    assert "== loss: done, 12 s" in text
    assert "left out: inductor: time was up" in text
    assert "== step: not run" in text
