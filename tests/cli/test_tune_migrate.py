"""``drivetrain tune --migrate``: what it refuses, and a real migration to two data-parallel ranks."""

import json
from typing import Any

import pytest

from drivetrain.archive.tunes import list_tunes
from drivetrain.cli.tune_migrate import refuse_ladder_options
from drivetrain.config import load_config
from drivetrain.errors import DrivetrainError
from runs_on_the_spot import Tiny


def test_options_of_the_search_are_refused() -> None:
    refuse_ladder_options(["--nproc", "--gate-steps", "--migrate"])
    with pytest.raises(DrivetrainError, match="drop --only, --grow-batch"):
        refuse_ladder_options(["--only", "--grow-batch", "--migrate"])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_two_ranks_are_proven_from_one_process_on(tiny: Tiny) -> None:
    done = tiny.run(
        "tune",
        str(tiny.file),
        "optimizer.fused=false",
        "parallelism.data_parallel_size=2",
        "training.train_iters=100",
        "model.hidden_dropout=0.1",
        "--migrate",
        *("--nproc", "2", "--gate-steps", "20", "--trial-steps", "4", "--json"),
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert [(rung["name"], rung["state"], rung["processes"]) for rung in document["rungs"]] == [
        ("plain start", "proven", 1),
        ("micro-batch", "proven", 1),
        ("data parallelism", "proven", 2),
    ]
    assert all(rung["step_s"] > 0 and rung["peak_memory_bytes"] > 0 for rung in document["rungs"])
    assert document["rungs"][2]["gate"]["tier"] == "round-off"
    assert document["final_gate"]["verdict"] == "pass"
    assert any("without dropout" in finding for finding in document["findings"])
    (path,) = list_tunes(tiny.folder / "tunes")
    final = load_config(str(path / document["final"]["config"])).config
    assert (final.parallelism.data_parallel_size, final.model.hidden_dropout) == (2, 0.1)
    assert list((path / "runs").glob("*/checkpoints")) == []
    shown = tiny.run("tune", "--replay", path.name)
    assert shown.returncode == 0, shown.stderr
    assert "data parallelism" in shown.stdout
    assert "the final configuration (2 proven)" in shown.stdout
    again = tiny.run("tune", path.name)
    assert again.returncode == 2
    assert "is finished" in again.stderr
