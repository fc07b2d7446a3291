"""Profile windows inside runs: what is recorded, how large it may be, what interrupts it, what it cost."""

import gzip
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from drivetrain.archive.reader import Run, open_run
from drivetrain.engine.profiling import WindowPlan
from drivetrain.engine.trace_file import export_trace, remove_leftovers
from drivetrain.errors import EnvironmentFault
from runs_on_the_spot import Tiny

WINDOW = ["profiler.profile=true", "profiler.profile_step_start=7", "profiler.profile_step_end=10"]
SPANS = {"fetch", "h2d", "forward", "backward", "optimizer", "log", "sync"}


def trace_of(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return document


def names_of(trace: dict[str, Any], category: str = "user_annotation") -> list[str]:
    return [event["name"] for event in trace["traceEvents"] if event.get("cat") == category]


def steps_of(trace: dict[str, Any]) -> list[str]:
    return [name for name in names_of(trace) if name.startswith("ProfilerStep")]


def windows(run: Run, what: str) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["kind"] == "window" and event["what"] == what]


def traces_in(run: Run) -> list[str]:
    """Everything in the run's profile folder, unfinished files included."""
    folder = run.path / "profile"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_plan_surrounds_the_window_with_a_trial_and_equal_windows() -> None:
    plan = WindowPlan(7, 9)
    assert plan.num_steps == 3
    assert (plan.before, plan.trial, plan.after) == ((3, 5), 6, (10, 12))
    assert plan.cut(7).after == (8, 8)
    assert plan.cut(7).before == (5, 5)


def test_a_window_is_recorded_on_every_rank_with_steps_spans_and_layout(tiny: Tiny) -> None:
    run = tiny.train_on_ranks(
        2,
        *WINDOW,
        "profiler.profile_ranks=all",
        "training.train_iters=14",
        "training.eval_interval=8",
        "checkpoint.save_interval=9",
    )
    assert traces_in(run) == ["7-9/rank0.json.gz", "7-9/rank1.json.gz"]
    for rank in (0, 1):
        trace = trace_of(run.path / "profile" / "7-9" / f"rank{rank}.json.gz")
        assert steps_of(trace) == ["ProfilerStep#7", "ProfilerStep#8", "ProfilerStep#9"]
        annotations = names_of(trace)
        for span in SPANS:
            assert annotations.count(f"drivetrain/{span}") >= 3, span
        # Step 8 is followed by an evaluation; the checkpoint after step 9 is within it as well.
        assert annotations.count("drivetrain/evaluation") == 1
        assert annotations.count("drivetrain/checkpoint") == 1
        assert "gloo:all_reduce" in annotations
        assert trace["distributedInfo"]["rank"] == rank
        about = trace["drivetrain"]
        assert (about["rank"], about["world_size"], about["first"], about["last"]) == (rank, 2, 7, 9)
        assert about["layout"] == {"dp": 2}
        assert about["tokens"] == 3 * 8 * 32
        assert about["model_flops"] > 0
        assert about["run"] == run.path.name
        matmul = next(event for event in trace["traceEvents"] if event.get("name") == "aten::mm")
        assert matmul["args"]["Input Dims"], "shapes are recorded"
        text = gzip.decompress((run.path / "profile" / "7-9" / f"rank{rank}.json.gz").read_bytes())
        assert str(tiny.runs).encode() not in text, "a run can be moved, so no file of it names its place"
    (event,) = windows(run, "profile")
    assert (event["first"], event["last"], event["path"]) == (7, 9, "profile/7-9")
    assert event["ranks"] == [0, 1]
    assert event["file_bytes"].keys() == {"rank0.json.gz", "rank1.json.gz"}
    assert event["cut_because"] is None


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> dict[str, Any]:
    """The ``--json`` document of a run of 14 steps with the window in it."""
    return Tiny(tmp_path_factory.mktemp("watched"), tiny_corpus).train(*WINDOW, "training.train_iters=14")


def test_profiled_steps_are_tagged_and_out_of_steady_state_and_the_cost_is_told(
    watched: dict[str, Any],
) -> None:
    document = watched
    run = open_run(document["run"])
    tagged = [line["step"] for line in run.metrics() if "profile" in line["tags"]]
    assert tagged == [6, 7, 8, 9], "the trial and the window"
    assert document["mfu_rule"]["window"] == "steps 3-14 of steady state, 8 steps"
    assert document["wall"]["maintenance_s"]["profile"] > 0
    (event,) = windows(run, "profile_overhead")
    steps = {line["step"]: line["time/step_s"] for line in run.metrics()}
    assert event["step_s_profiled"] == sorted(steps[step] for step in (7, 8, 9))[1]
    plain = sorted(steps[step] for step in (3, 4, 5, 10, 11, 12))
    assert event["step_s_plain"] == pytest.approx((plain[2] + plain[3]) / 2)
    assert event["ratio"] == pytest.approx(event["step_s_profiled"] / event["step_s_plain"])
    assert event["step_s_before"] == sorted(steps[step] for step in (3, 4, 5))[1]
    assert event["step_s_after"] == sorted(steps[step] for step in (10, 11, 12))[1]
    assert (event["num_profiled"], event["num_plain"], event["reason"]) == (3, 6, None)


def test_a_window_with_no_room_around_it_is_recorded_without_a_ratio(tiny: Tiny) -> None:
    settings = ["profiler.profile=true", "profiler.profile_step_start=4", "profiler.profile_step_end=6"]
    run = open_run(tiny.train(*settings, "training.train_iters=5")["run"])
    assert traces_in(run) == ["4-5/rank0.json.gz"]
    (event,) = windows(run, "profile_overhead")
    assert event["ratio"] is None
    assert "without the profiler" in event["reason"]


def test_only_the_chosen_ranks_write_and_all_are_tagged(tiny: Tiny) -> None:
    run = tiny.train_on_ranks(2, *WINDOW, "profiler.profile_ranks=1", "training.train_iters=10")
    assert traces_in(run) == ["7-9/rank1.json.gz"]
    assert [line["step"] for line in run.metrics() if "profile" in line["tags"]] == [6, 7, 8, 9]


def test_the_profiler_changes_no_number_of_the_training(tiny: Tiny, watched: dict[str, Any]) -> None:
    plain = open_run(tiny.train("training.train_iters=14")["run"]).metrics()
    with_profiler = open_run(watched["run"]).metrics()
    assert [line["train/loss"] for line in plain] == [line["train/loss"] for line in with_profiler]


def test_the_size_limit_shortens_the_window_and_says_so(tiny: Tiny, watched: dict[str, Any]) -> None:
    (event,) = windows(open_run(watched["run"]), "profile")
    limit = int(event["file_bytes"]["rank0.json.gz"] / 3 * 2.6)
    settings = [f"profiler.file_size_limit_bytes={limit}", "training.train_iters=10"]
    run = open_run(tiny.train(*WINDOW, *settings)["run"])
    assert traces_in(run) == ["7-8/rank0.json.gz"]
    (event,) = windows(run, "profile")
    assert event["last"] == 8
    assert f"{limit:,}" in event["cut_because"]
    assert event["file_bytes"]["rank0.json.gz"] <= limit
    assert any("profiled, not up to 9" in event.get("message", "") for event in run.events())


def test_a_limit_below_one_step_gives_no_window_and_a_warning(tiny: Tiny) -> None:
    settings = [*WINDOW, "profiler.profile_ranks=all", "profiler.file_size_limit_bytes=100"]
    run = tiny.train_on_ranks(2, *settings, "training.train_iters=10")
    assert run.status() == "finished"
    assert traces_in(run) == []
    assert windows(run, "profile") == []
    assert any("the trace of one step takes" in event.get("message", "") for event in run.events())


def wait_for_step(tiny: Tiny, process: "subprocess.Popen[bytes]", step: int) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if any(
            path.read_bytes().count(b"\n") > step for path in tiny.runs.glob("*/segments/0000/metrics.jsonl")
        ):
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached")


LONG_WINDOW = ["profiler.profile=true", "profiler.profile_step_start=5", "profiler.profile_step_end=3001"]


def test_an_interrupted_window_holds_the_steps_that_were_done(tiny: Tiny) -> None:
    process = tiny.start("train", str(tiny.file), *LONG_WINDOW, "training.train_iters=3000")
    wait_for_step(tiny, process, 10)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors.decode()
    run = tiny.only_run()
    (event,) = windows(run, "profile")
    last = run.metrics()[-1]["step"]
    assert 10 <= last < 3000
    assert (event["first"], event["last"]) == (5, last)
    assert event["cut_because"] == f"the run ended with step {last}"
    assert traces_in(run) == [f"5-{last}/rank0.json.gz"]
    trace = trace_of(run.path / event["path"] / "rank0.json.gz")
    assert steps_of(trace) == [f"ProfilerStep#{step}" for step in range(5, last + 1)]
    assert trace["drivetrain"]["last"] == last


def test_a_killed_window_leaves_no_file(tiny: Tiny) -> None:
    process = tiny.start("train", str(tiny.file), *LONG_WINDOW, "training.train_iters=3000")
    wait_for_step(tiny, process, 10)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert traces_in(tiny.only_run()) == []


def test_a_run_resumed_beyond_its_window_trains_on_and_says_that_it_is_not_profiled(tiny: Tiny) -> None:
    process = tiny.start("train", str(tiny.file), "training.train_iters=3000")
    wait_for_step(tiny, process, 10)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    run = tiny.only_run()
    config = run.path / "config.toml"
    text = config.read_text()
    text = text.replace("train_iters = 3000", f"train_iters = {run.metrics()[-1]['step'] + 4}")
    config.write_text(text.replace("\nprofile = false", "\nprofile = true"))
    done = tiny.run("train", str(run.path))
    assert done.returncode == 0, done.stderr
    assert "steps 10-11 are not profiled: this segment begins with step" in done.stderr
    assert traces_in(run) == []


@pytest.mark.long
def test_compiled_kernels_show_under_their_own_names(tiny: Tiny) -> None:
    settings = [*WINDOW, "training.train_iters=12", "fusion.compile=true"]
    run = open_run(tiny.train(*settings)["run"])
    operators = names_of(trace_of(run.path / "profile" / "7-9" / "rank0.json.gz"), "cpu_op")
    assert any("cpp_fused" in name for name in operators)


def stopped_profiler() -> profile:
    recorder = profile(activities=[ProfilerActivity.CPU])
    recorder.start()
    torch.ones(3).sum()
    recorder.stop()
    return recorder


def test_a_trace_that_cannot_be_written_leaves_the_former_one_and_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "7-9"
    target = folder / "rank0.json.gz"
    with pytest.raises(EnvironmentFault, match="the trace is lost"):
        export_trace(stopped_profiler(), target)
    folder.mkdir()
    target.write_bytes(b"former")
    export_trace(stopped_profiler(), target)
    assert trace_of(target)["traceName"] == "rank0.json"
    assert os.listdir(folder) == ["rank0.json.gz"]


def test_a_trace_that_torch_cut_short_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = stopped_profiler()
    whole = recorder.export_chrome_trace

    def onto_a_full_disk(path: str, use_python_export: bool = False) -> None:
        whole(path)
        os.truncate(path, os.path.getsize(path) - 40)

    monkeypatch.setattr(recorder, "export_chrome_trace", onto_a_full_disk)
    with pytest.raises(EnvironmentFault, match="No space left on device"):
        export_trace(recorder, tmp_path / "rank0.json.gz")
    assert os.listdir(tmp_path) == []


def test_what_a_killed_export_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    window = tmp_path / "7-9"
    window.mkdir()
    for name in (".1-ab.plain.tmp", ".1-ab.packed.tmp", "rank0.json.gz"):
        (window / name).touch()
    remove_leftovers(tmp_path)
    assert os.listdir(window) == ["rank0.json.gz"]
