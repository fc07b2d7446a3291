"""``drivetrain profile``: a new run that is just long enough, its files, its cost and its account."""

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.reader import open_run
from drivetrain.cli.profile_command import with_window
from drivetrain.config import load_config, total_tokens, violations
from drivetrain.errors import ConfigurationError
from runs_on_the_spot import Tiny


def document_of(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.long
def test_two_ranks_are_profiled_calibrated_and_accounted_for(tiny: Tiny) -> None:
    done = tiny.run("profile", str(tiny.file), "--steps", "2", "--nproc", "2", "--json")
    document = document_of(done)
    assert document["status"] == "finished"
    assert (document["window"]["first"], document["window"]["last"]) == (6, 7)
    assert [Path(file).name for file in document["files"]] == ["rank0.json.gz", "rank1.json.gz"]
    assert all(Path(file).is_file() for file in document["files"])
    overhead = document["overhead"]
    assert (overhead["num_profiled"], overhead["num_plain"]) == (2, 4)
    assert overhead["ratio"] == pytest.approx(overhead["step_s_profiled"] / overhead["step_s_plain"])
    run = open_run(document["run"])
    assert run.metrics()[-1]["step"] == 9, "two of warm-up, two plain, one on trial, two profiled, two plain"
    written = json.loads((run.path / "account.json").read_text())
    assert document["account"] == str(run.path / "account.json")
    assert written["schema"] == 1
    (window,) = written["windows"]
    assert (window["first"], window["last"]) == (6, 7)
    for rank in window["account"]["ranks"]:
        assert [step["step"] for step in rank["steps"]] == [6, 7]
        whole = rank["whole"]
        assert sum(whole["classes"].values()) + whole["unexplained_ns"] == whole["window_ns"]
        assert whole["unexplained_ns"] <= 0.01 * whole["window_ns"]
        assert whole["classes"]["compute.matmul"] > 0
        assert whole["classes"]["compute.loss"] > 0


def test_a_run_is_started_again_and_left_as_it_is(tiny: Tiny) -> None:
    former = open_run(tiny.train("training.train_iters=4", "optimizer.lr=1e-4")["run"])
    before = sorted((path, path.stat().st_mtime_ns) for path in former.path.rglob("*"))
    done = tiny.run("profile", str(former.path), "optimizer.adam_beta2=0.9", "--steps", "1", "--json")
    run = open_run(document_of(done)["run"])
    assert run.path != former.path
    assert run.name == former.name
    assert run.config().optimizer.lr == 1e-4
    assert run.config().optimizer.adam_beta2 == 0.9
    assert sorted((path, path.stat().st_mtime_ns) for path in former.path.rglob("*")) == before


def test_without_json_the_account_is_printed_and_the_files_are_named(tiny: Tiny) -> None:
    done = tiny.run("profile", str(tiny.file), "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert "compute.matmul" in done.stdout
    assert "a new run of 6 steps, of which step 5 is profiled" in done.stderr
    assert "rank0.json.gz" in done.stderr
    assert "account.json" in done.stderr


def test_the_short_run_follows_the_schedule_of_the_whole_one() -> None:
    whole = load_config("llama-2m").config
    loaded = with_window("llama-2m", None, [], 5, None)
    training, profiler = loaded.config.training, loaded.config.profiler
    assert (profiler.profile_step_start, profiler.profile_step_end, training.train_iters) == (9, 14, 18)
    assert profiler.profile_ranks == "all"
    assert loaded.config.lr_schedule.lr_decay_tokens == total_tokens(whole)
    assert violations(loaded.config) == []


def test_no_step_is_calibration_that_was_fed_from_what_was_ready_at_the_start() -> None:
    """Four micro-batches a step on one process, and twelve that workers can have ready."""

    def first(*overrides: str, start: int | None = None, processes: int | None = None) -> int:
        fed = ["data.num_workers=4", "data.prefetch_factor=3", "training.micro_batch_size=4", *overrides]
        return with_window("llama-2m", None, fed, 5, start, processes).config.profiler.profile_step_start

    assert first() == 9 + 3
    assert first(processes=2) == 9 + 6
    assert first("data.num_workers=0", "data.prefetch_batches=8") == 9 + 2
    assert first(start=9) == 9
    assert first("training.micro_batch_size=7") == 9, "the rule that is broken is said by the caller"


def test_what_the_user_gives_is_kept() -> None:
    overrides = ["training.train_iters=500", "profiler.profile_ranks=0", "profiler.with_stack=true"]
    loaded = with_window("llama-2m", None, overrides, 5, 100)
    assert loaded.config.training.train_iters == 500
    assert loaded.config.profiler.profile_ranks == "0"
    assert loaded.config.profiler.profile_step_start == 100


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("profiler.profile_step_start=7", "use --start"),
        ("profiler.profile_step_end=7", "use --steps"),
        ("profiler.profile=false", "in any case"),
    ],
)
def test_what_the_verb_sets_itself_is_refused_with_the_option(override: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError, match=remedy):
        with_window("llama-2m", None, [override], 5, None)


def test_a_window_that_fits_nothing_is_the_answer_no(tiny: Tiny) -> None:
    done = tiny.run("profile", str(tiny.file), "profiler.file_size_limit_bytes=10", "--steps", "1", "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["window"] is None
    assert document["files"] == []
    assert "the trace of one step takes" in done.stderr
