"""A profiled window shows each optimisation that is on, and shows none that is off."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.optimisations import records_of
from drivetrain.archive.reader import open_run
from drivetrain.catalogue import catalogue
from drivetrain.measure.optimisation import OptimisationRecord
from runs_on_the_spot import Tiny

WINDOW = ["profiler.profile=true", "profiler.profile_step_start=5", "profiler.profile_step_end=7"]
OFF = [
    "fusion.compile=false",
    "optimizer.fused=false",
    "precision.params_dtype=fp32",
    "data.num_workers=0",
    "overlap.bucket_size_mb=0",
    "checkpoint.async_save=false",
    "checkpoint.save_interval=2",
]
ON = [
    "optimizer.fused=true",
    "precision.params_dtype=bf16",
    "data.num_workers=1",
    "checkpoint.async_save=true",
]
# Gradients of the tiny model are 0.18 MB.
RUNS: dict[str, tuple[list[str], list[str]]] = {
    "off": ([*OFF, *WINDOW], []),
    "on": ([*OFF, *ON, *WINDOW], []),
    "two, off": ([*OFF, *WINDOW], ["--nproc", "2"]),
    "two, on": ([*OFF, *WINDOW, "overlap.bucket_size_mb=0.05"], ["--nproc", "2"]),
    "compiled": ([*OFF, *WINDOW, "fusion.compile=true"], []),
}
ON_IN = {
    "async_save": "on",
    "bf16": "on",
    "compile": "compiled",
    "data_workers": "on",
    "ddp_bucket": "two, on",
    "fused_adamw": "on",
}
OFF_IN = {name: "two, off" if name == "ddp_bucket" else "off" for name in ON_IN}

Train = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def summary_of(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Train:
    """The ``--json`` document of one of ``RUNS``, trained once."""
    done: dict[str, dict[str, Any]] = {}

    def train(which: str) -> dict[str, Any]:
        if which not in done:
            overrides, options = RUNS[which]
            done[which] = Tiny(tmp_path_factory.mktemp("evidence"), tiny_corpus).train(
                *overrides, options=options
            )
        return done[which]

    return train


def record_of(summary: dict[str, Any], name: str) -> OptimisationRecord:
    (document,) = [one for one in summary["optimisations"] if one["name"] == name]
    record = OptimisationRecord.from_document(document)
    (stored,) = [one for one in records_of(open_run(summary["run"])) if one.name == name]
    assert stored == record, "the run directory says what the document says"
    return record


def test_every_entry_is_tried() -> None:
    assert sorted(ON_IN) == [one.name for one in catalogue()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name == "compile" else []) for name in ON_IN]
)
def test_an_optimisation_that_is_on_is_shown(summary_of: Train, name: str) -> None:
    summary = summary_of(ON_IN[name])
    record = record_of(summary, name)
    assert (record.requested, record.active) == (True, True)
    assert record.evidence is not None
    assert record.evidence.kind == "shown", record.evidence.why
    assert not record.without_effect
    assert [
        finding for finding in summary["findings"] if record.field in finding and "no effect" in finding
    ] == []


@pytest.mark.parametrize("name", OFF_IN)
def test_an_optimisation_that_is_off_is_absent(summary_of: Train, name: str) -> None:
    summary = summary_of(OFF_IN[name])
    record = record_of(summary, name)
    assert (record.requested, record.active) == (False, False)
    assert record.evidence is not None
    assert record.evidence.kind == "absent", record.evidence.why
    assert summary["findings"] == []


def test_events_hold_the_start_and_the_window_of_each(summary_of: Train) -> None:
    events = [
        event for event in open_run(summary_of("off")["run"]).events() if event["kind"] == "optimisation"
    ]
    names = [one.name for one in catalogue()]
    assert [(event["when"], event["name"]) for event in events] == [
        *(("start", name) for name in names),
        *(("window", name) for name in names),
    ]
    assert all((event["evidence"] is None) == (event["when"] == "start") for event in events)


def test_profile_says_what_its_window_shows(tiny: Tiny) -> None:
    done = tiny.run("profile", str(tiny.file), "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr
    training = json.loads(done.stdout)["training"]
    record = record_of(training, "fused_adamw")
    assert record.evidence is not None
    assert record.evidence.kind == "shown"
    assert "evidence of fused_adamw: shown, the update ran fused: 2 x aten::_fused_adamw_" in done.stderr


@pytest.mark.long
def test_under_the_users_own_torchrun_the_first_rank_reads_the_window(tiny: Tiny) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "drivetrain", "train", str(tiny.file), "overlap.bucket_size_mb=0.05", *WINDOW, "--json"),
        ],
        cwd=tiny.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    evidence = record_of(summary, "ddp_bucket").evidence
    assert evidence is not None
    assert evidence.kind == "shown"
    windows = [event for event in tiny.only_run().events() if event.get("when") == "window"]
    assert len(windows) == len(catalogue()), "one rank wrote them"
