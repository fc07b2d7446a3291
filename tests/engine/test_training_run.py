"""Whole runs through the command line: figures, interruption, resumption, faults."""

import json
import math
import os
import random
import signal
import time
from pathlib import Path

import pytest

from drivetrain.archive.collective_waits import waits_of_run
from drivetrain.archive.reader import open_run
from runs_on_the_spot import Tiny, losses_of

CONTRACT = {
    "run",
    "status",
    "final_loss",
    "validation_loss",
    "validation_bits_per_byte",
    "tokens_per_second",
    "effective_tokens_per_second",
    "mfu",
    "hfu",
    "step_time_s",
    "data_wait_frac",
    "communication_exposed_frac",
    "peak_memory_bytes",
    "mfu_rule",
}


def test_a_run_reports_the_contract_and_learns(tiny: Tiny) -> None:
    document = tiny.train("training.train_iters=30")
    assert document.keys() >= CONTRACT
    assert set(document["step_time_s"]) == {"p50", "p90", "max"}
    assert set(document["mfu_rule"]) == {"flops_rule", "token_rule", "peak_source", "window"}
    assert document["status"] == "finished"
    assert document["communication_exposed_frac"] is None, "one process communicates with nobody"
    run = open_run(document["run"])
    assert run.status() == "finished"
    losses = losses_of(run)
    assert list(losses) == list(range(1, 31))
    assert document["final_loss"] == losses[30]
    assert losses[30] < losses[1] - 0.3
    assert abs(losses[1] - math.log(384)) < 0.3, "an untrained model knows nothing"
    assert document["validation_bits_per_byte"] > 0
    assert document["mfu_rule"]["window"].startswith("steps 3-30")
    last = run.metrics()[-1]
    assert last["progress/tokens"] == 30 * 8 * 32
    assert last["progress/samples"] == 240


def test_no_peak_means_no_mfu_and_a_reason(tiny: Tiny, tmp_path: Path) -> None:
    done = tiny.run(
        "train", str(tiny.file), "--json", environment={"DRIVETRAIN_CACHE": str(tmp_path / "empty")}
    )
    document = json.loads(done.stdout)
    assert document["mfu"] is None
    assert document["hfu"] is None
    assert document["mfu_rule"]["peak_source"] is None
    assert "drivetrain bench gemm" in document["reasons"]["mfu"]


def test_the_micro_batch_split_changes_nothing_but_rounding(tiny: Tiny) -> None:
    one = losses_of(open_run(tiny.train("training.micro_batch_size=8")["run"]))
    eight = losses_of(open_run(tiny.train("training.micro_batch_size=1")["run"]))
    assert one.keys() == eight.keys()
    assert all(abs(one[step] - eight[step]) < 1e-4 for step in one)


def test_two_processes_train_as_one(tiny: Tiny) -> None:
    alone = tiny.train()
    together = tiny.train("monitor.log_rank_times=true", options=["--nproc", "2"])
    one, two = losses_of(open_run(alone["run"])), losses_of(open_run(together["run"]))
    assert all(abs(one[step] - two[step]) < 1e-4 for step in one)
    assert alone.keys() == together.keys(), "one document, however many processes"
    assert 0 <= together["communication_exposed_frac"] < 1
    dp = together["communication"]["groups"]["dp"]
    assert dp["bytes"] == together["communication_bytes_per_step"]["dp"]
    assert together["communication"]["steps"] == 6, "the steps of warm-up are left out"
    assert abs(alone["validation_loss"] - together["validation_loss"]) < 1e-4
    ranks = open_run(together["run"]).ranks()
    assert sorted(ranks) == [0, 1]
    assert [line["step"] for line in ranks[1]] == list(range(1, 9))
    for line in ranks[1]:
        waits = line["time/data_wait_s"] + line["time/comm_exposed_s"]
        assert line["time/own_work_s"] == pytest.approx(line["time/step_s"] - waits)
    found = waits_of_run(open_run(together["run"]))
    assert found is not None
    assert found.steps == 6
    groups = {group.group: group for group in found.groups}
    assert groups.keys() == {"dp", "world"}
    assert groups["dp"].collectives == 6 * dp["calls"], "each was found on both ranks"
    assert sum(groups["dp"].times_last.values()) == groups["dp"].collectives


def test_log_interval_averages_over_the_steps_since_the_last_record(tiny: Tiny) -> None:
    run = open_run(tiny.train("monitor.log_interval=3", "training.train_iters=8")["run"])
    lines = run.metrics()
    assert [line["step"] for line in lines] == [3, 6, 8]
    assert [line["tags"] for line in lines] == [["warmup"], [], []], "also of steps that are no record's last"
    for line in lines:
        tokens_per_step = 8 * 32
        assert line["throughput/tokens_per_sec"] == pytest.approx(tokens_per_step / line["time/step_s"])


def kill_and_resume(tiny: Tiny, kills: int, seed: int, *overrides: str) -> None:
    """Kill a run ``kills`` times at random moments, continue each time; losses must equal an unbroken run's."""
    draw = random.Random(seed)
    settings = [
        "checkpoint.save_interval=5",
        "training.train_iters=60",
        "model.hidden_dropout=0.1",
        *overrides,
    ]
    expected = losses_of(open_run(tiny.train(*settings)["run"]))
    before = set(tiny.runs.iterdir())
    process = tiny.start("train", str(tiny.file), *settings)
    path: Path | None = None
    for _ in range(kills):
        aim = draw.randint(1, 55)
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            new = set(tiny.runs.iterdir()) - before
            path = path or (new.pop() if new else None)
            metrics = sorted(path.glob("segments/*/metrics.jsonl")) if path is not None else []
            if metrics and metrics[-1].stat().st_size and metrics[-1].read_bytes().count(b"\n") > aim % 12:
                break
            time.sleep(0.005)
        time.sleep(draw.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert path is not None
        if open_run(path).status() == "finished":
            break
        process = tiny.start("train", str(path))
    _, errors = process.communicate(timeout=600)
    assert path is not None
    run = open_run(path)
    assert run.status() == "finished", errors.decode()
    assert losses_of(run) == expected


def test_a_run_killed_at_a_random_step_continues_to_the_bit(tiny: Tiny) -> None:
    kill_and_resume(tiny, 1, seed=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_killed_twenty_times_continues_to_the_bit(tiny: Tiny) -> None:
    kill_and_resume(tiny, 20, 2, "precision.params_dtype=bf16")


@pytest.mark.parametrize(
    "signal_number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_an_interrupted_run_saves_exits_130_and_continues(tiny: Tiny, signal_number: int) -> None:
    settings = ["training.train_iters=100000"]
    process = tiny.start("train", str(tiny.file), *settings)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if any(path.stat().st_size > 2000 for path in tiny.runs.glob("*/segments/0000/metrics.jsonl")):
            break
        time.sleep(0.01)
    process.send_signal(signal_number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors.decode()
    run = tiny.only_run()
    assert run.status() == "interrupted"
    stopped_at = max(losses_of(run))
    assert (run.path / "checkpoints" / f"step-{stopped_at:08d}").is_dir()
    assert run.end()["reason"] == signal.Signals(signal_number).name  # type: ignore[index]


@pytest.mark.long
def test_several_processes_stop_together_when_asked(tiny: Tiny) -> None:
    process = tiny.start("train", str(tiny.file), "training.train_iters=100000", "--nproc", "2")
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if any(path.stat().st_size > 2000 for path in tiny.runs.glob("*/segments/0000/metrics.jsonl")):
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors.decode()
    assert tiny.only_run().status() == "interrupted"


def test_a_damaged_newest_checkpoint_is_passed_over_and_said_so(tiny: Tiny) -> None:
    settings = ["checkpoint.save_interval=2", "training.train_iters=8", "checkpoint.keep_latest_k=3"]
    expected = losses_of(open_run(tiny.train(*settings)["run"]))
    run = tiny.only_run()
    (run.path / "events.jsonl").write_bytes(
        b"".join(
            line for line in (run.path / "events.jsonl").read_bytes().splitlines(True) if b'"end"' not in line
        )
    )
    weights = run.path / "checkpoints" / "step-00000008" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-10] ^= 1
    weights.write_bytes(content)
    done = tiny.run("train", str(run.path), "--json")
    assert done.returncode == 0, done.stderr
    assert "step-00000008 is damaged" in done.stderr
    again = open_run(run.path)
    assert any("step-00000008 is damaged" in event.get("message", "") for event in again.events())
    assert losses_of(again) == expected


def test_a_loss_that_is_not_finite_ends_the_run_with_exit_code_1(tiny: Tiny) -> None:
    done = tiny.run(
        "train",
        str(tiny.file),
        "optimizer.lr=10",
        "training.clip_grad=0",
        "model.init_method_std=1",
        "training.train_iters=200",
        "precision.params_dtype=bf16",
        "optimizer.adam_eps=1e-8",
        "optimizer.weight_decay=10",
    )
    run = tiny.only_run()
    assert done.returncode == 1, done.stderr[-500:]
    assert run.status() == "failed"
    assert "not finite" in str(run.end())
    assert not (run.path / "checkpoints").exists(), "weights that hold NaN are not worth a checkpoint"


def test_a_memory_limit_below_the_step_is_out_of_memory_with_exit_code_2(tiny: Tiny) -> None:
    done = tiny.run("train", str(tiny.file), "memory.device_memory_limit_bytes=700000")
    assert done.returncode == 2
    assert "out of memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_memory_limit_above_the_step_changes_no_bit(tiny: Tiny) -> None:
    free = losses_of(open_run(tiny.train("model.hidden_dropout=0.1")["run"]))
    limited = tiny.train("model.hidden_dropout=0.1", "memory.device_memory_limit_bytes=100000000")
    assert losses_of(open_run(limited["run"])) == free


def test_another_corpus_under_a_run_is_refused(tiny: Tiny, tiny_corpus: Path) -> None:
    from drivetrain.engine.data.prepare import prepare

    source = tiny.folder / "text.txt"
    source.write_text(Path(os.__file__).read_text())
    prepare([source], tiny.folder / "own", vocab_size=300)
    process = tiny.run(
        "train", str(tiny.file), f"data.data_path={tiny.folder / 'own'}", "training.train_iters=2"
    )
    assert process.returncode == 0, process.stderr
    run = tiny.only_run()
    events = run.path / "events.jsonl"
    events.write_bytes(
        b"".join(line for line in events.read_bytes().splitlines(True) if b'"end"' not in line)
    )
    source.write_text(Path(json.__file__).read_text() * 3)
    prepare([source], tiny.folder / "own", vocab_size=300)
    done = tiny.run("train", str(run.path))
    assert done.returncode == 2
    assert "is not the one this run was started with" in done.stderr
