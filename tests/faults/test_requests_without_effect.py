"""A request that cannot take effect: the run goes on, and says so on the terminal, in its events and in its summary."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.optimisations import records_of
from drivetrain.archive.reader import Run, open_run
from drivetrain.cli.evidence import with_evidence
from runs_on_the_spot import Tiny

# Sabotage from outside: a torch without the fused kernel, a processor without bf16 units, a compiler switched off.
SABOTAGED = """
import drivetrain.engine.capabilities, drivetrain.engine.ops.adamw
drivetrain.engine.ops.adamw._get_fused_kernels_supported_devices = lambda: ["cuda"]
drivetrain.engine.capabilities.cpu_flags = frozenset
from drivetrain.cli.application import main
main()
"""
SILENT = """
from drivetrain.engine.model.decoder import Decoder
Decoder.compile_blocks = lambda self, **options: None
from drivetrain.cli.application import main
main()
"""
WINDOW = ["profiler.profile=true", "profiler.profile_step_start=5", "profiler.profile_step_end=7"]


@dataclass(frozen=True)
class Told:
    """Everything that a run told."""

    summary: dict[str, Any]
    stderr: str
    run: Run

    @property
    def warnings(self) -> list[str]:
        return [event["message"] for event in self.run.events() if event["kind"] == "warning"]


def train(tiny: Tiny, program: str, *overrides: str, environment: dict[str, str] | None = None) -> Told:
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(tiny.file), *overrides, "--json"],
        cwd=tiny.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    return Told(summary, done.stderr, open_run(summary["run"]))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Told:
    """A run in which four requests cannot take effect, or not as hoped."""
    tiny = Tiny(tmp_path_factory.mktemp("sabotage"), tiny_corpus)
    return train(
        tiny,
        SABOTAGED,
        "fusion.compile=true",
        "precision.params_dtype=bf16",
        "overlap.bucket_size_mb=3",
        environment={"TORCHDYNAMO_DISABLE": "1"},
    )


def test_fp16_without_units_for_it_trains_and_is_said_to_be_slow(tiny: Tiny) -> None:
    told = train(tiny, SABOTAGED, "precision.params_dtype=fp16", "training.eval_iters=0", environment={})
    assert told.summary["status"] == "finished"
    (finding,) = [text for text in told.summary["findings"] if "fp16" in text]
    assert finding.startswith(
        "precision.params_dtype = fp16 is in effect, but the processor has none of amx_fp16, asimdhp"
    )
    assert "fp16 products are many times slower than those of fp32" in finding
    assert finding in told.warnings


@pytest.mark.parametrize(
    ("name", "active", "finding"),
    [
        ("compile", False, "fusion.compile = true is not in effect: TORCHDYNAMO_DISABLE=1 is set"),
        ("fused_adamw", False, "optimizer.fused = true is not in effect: torch"),
        ("bf16", True, "precision.params_dtype = bf16 is in effect, but the processor has none of"),
        ("ddp_bucket", False, "overlap.bucket_size_mb = 3.0 is not in effect: one process has nobody"),
    ],
)
def test_a_request_without_effect_is_told_everywhere(
    told: Told, name: str, active: bool, finding: str
) -> None:
    assert [text for text in told.warnings if text.startswith(finding)], "a warning event"
    assert f"warning: {finding}" in told.stderr, "a line at the terminal"
    assert [text for text in told.summary["findings"] if text.startswith(finding)], "a finding in the summary"
    (document,) = [one for one in told.summary["optimisations"] if one["name"] == name]
    assert (document["requested"], document["active"]) == (True, active)
    assert document["reason"] in " ".join(told.summary["findings"])
    (record,) = [one for one in records_of(told.run) if one.name == name]
    assert record.to_document() == document
    stored = told.run.summary()
    assert stored is not None
    assert stored["optimisations"] == told.summary["optimisations"]


def test_the_run_itself_goes_on_and_is_finished(told: Told) -> None:
    assert told.summary["status"] == "finished"
    assert told.summary["steps"] == 8
    starts = [
        event for event in told.run.events() if event["kind"] == "optimisation" and event["when"] == "start"
    ]
    assert [event["name"] for event in starts] == sorted(event["name"] for event in starts)
    assert {event["evidence"] for event in starts} == {None}, "no window, no evidence"


def test_a_compiler_that_compiled_nothing_is_found_at_the_end(tiny: Tiny) -> None:
    told = train(tiny, SILENT, "fusion.compile=true", *WINDOW)
    finding = "fusion.compile = true is not in effect: torch.compile has built no graph"
    assert [text for text in told.summary["findings"] if text.startswith(finding)]
    assert [text for text in told.warnings if text.startswith(finding)]
    (record,) = [one for one in records_of(told.run) if one.name == "compile"]
    assert not record.active
    assert record.evidence is not None
    assert record.evidence.kind == "absent", "and the window agrees"


@pytest.mark.long
def test_code_that_could_not_be_compiled_is_counted_at_the_end(tiny: Tiny, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = -dumpfullversion ] && echo 13.0.0 && exit 0\nexit 1\n')
    compiler.chmod(0o755)
    told = train(
        tiny,
        "from drivetrain.cli.application import main; main()",
        "fusion.compile=true",
        environment={
            "CXX": str(compiler),
            "TORCHDYNAMO_SUPPRESS_ERRORS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        },
    )
    (finding,) = told.summary["findings"]
    assert "torch.compile gave up on" in finding


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    """The run directory of a run with a profiled window."""
    summary = Tiny(tmp_path_factory.mktemp("watched"), tiny_corpus).train(*WINDOW)
    evidence = {one["name"]: one["evidence"] for one in summary["optimisations"]}
    assert evidence.pop("async_save") == "unknown", "no checkpoint was saved in the window"
    nothing_gathers = {evidence.pop("overlap_param_gather"), evidence.pop("prefetch_blocks")}
    assert nothing_gathers == {"unknown"}, "there is one process"
    assert {name: kind for name, kind in evidence.items() if kind not in ("shown", "absent")} == {}
    return Path(summary["run"])


@pytest.fixture
def copied(watched: Path, tmp_path: Path) -> Run:
    """A copy of it, to be damaged."""
    return open_run(shutil.copytree(watched, tmp_path / watched.name))


def test_a_trace_that_cannot_be_read_leaves_evidence_unknown_and_says_so(
    copied: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (trace,) = (copied.path / "profile").rglob("*.json.gz")
    trace.write_bytes(b"no trace")
    summary = {"optimisations": ["as it was"]}
    assert with_evidence(copied.path, summary) == summary
    assert "warning: no evidence of optimisations: " in capsys.readouterr().err
    last = copied.events()[-1]
    assert last["kind"] == "warning"
    assert last["message"].startswith("no evidence of optimisations: ")


def test_the_window_of_an_earlier_segment_proves_nothing_of_the_last_one(copied: Run) -> None:
    (copied.path / "segments" / "0001").mkdir()
    before = copied.events()
    summary = {"optimisations": ["as it was"]}
    assert with_evidence(copied.path, summary) == summary
    assert copied.events() == before
