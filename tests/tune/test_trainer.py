"""However a run ends, it is a result. Real runs of the tiny model, each a process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain.archive.reader import open_run
from drivetrain.tune.trainer import CommandLineTrainer
from runs_on_the_spot import Tiny

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def trainer(tiny: Tiny, **settings) -> CommandLineTrainer:
    return CommandLineTrainer(
        tiny.folder / "logs", directory=tiny.folder, environment=ENVIRONMENT, **settings
    )


def test_a_run_that_finishes_is_known_with_its_summary(tiny: Tiny) -> None:
    attempt = trainer(tiny).train(tiny.file, ["training.train_iters=4", "run.name=mine"])
    assert attempt.outcome == "finished", attempt.message
    assert attempt.run is not None
    assert open_run(attempt.run).name == "mine"
    assert attempt.summary is not None
    assert attempt.summary["steps"] == 4
    assert attempt.elapsed_s > 0


def test_bad_input_is_refused_with_its_message(tiny: Tiny) -> None:
    attempt = trainer(tiny).train(tiny.file, ["training.global_batch_size=9"])
    assert (attempt.outcome, attempt.run, attempt.summary) == ("refused", None, None)
    assert "global_batch_size" in attempt.message


def test_running_out_of_memory_is_told_from_other_bad_input(tiny: Tiny) -> None:
    attempt = trainer(tiny).train(tiny.file, ["memory.device_memory_limit_bytes=1000"])
    assert attempt.outcome == "out_of_memory"
    assert "device_memory_limit_bytes = 1,000" in attempt.message


def test_a_diverged_run_is_told(tiny: Tiny) -> None:
    wild = [
        "optimizer.lr=10",
        "training.clip_grad=0",
        "optimizer.weight_decay=10",
        "training.train_iters=400",
    ]
    attempt = trainer(tiny).train(tiny.file, [*wild, "lr_schedule.lr_decay_style=constant"])
    assert attempt.outcome == "diverged", attempt.message
    assert "not finite" in attempt.message


def test_a_run_that_stands_still_is_a_hang(tiny: Tiny) -> None:
    (tiny.folder / "stuck.py").write_text(
        "import time\ndef stuck(ids):\n    time.sleep(1000)\n    return ids\n"
    )
    watching = trainer(tiny, stall_s=8.0, grace_s=1.0)
    attempt = watching.train(tiny.file, ["data.transform=stuck:stuck"])
    assert attempt.outcome == "hang"
    assert "no step, phase or message for 8 s" in attempt.message


def test_a_run_beyond_its_time_is_a_hang(tiny: Tiny) -> None:
    attempt = trainer(tiny, grace_s=20.0).train(tiny.file, ["training.train_iters=1000000"], timeout_s=10.0)
    assert attempt.outcome == "hang"
    assert "10 s" in attempt.message


def test_a_process_that_dies_is_a_crash(tiny: Tiny) -> None:
    (tiny.folder / "dying.py").write_text("import os\ndef die(ids):\n    os.abort()\n")
    attempt = trainer(tiny).train(tiny.file, ["data.transform=dying:die"])
    assert attempt.outcome == "crash"
    assert "SIGABRT" in attempt.message


PARENT = """
import sys
from pathlib import Path
from drivetrain.tune.trainer import CommandLineTrainer
CommandLineTrainer(Path("logs")).train(Path("tiny.toml"), ["training.train_iters=1000000"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_run_ends_with_the_tuner_that_started_it(tiny: Tiny) -> None:
    tuner = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=tiny.folder, env={**os.environ, **ENVIRONMENT}
    )
    beat = None
    while beat is None or beat["step"] < 1:
        time.sleep(0.1)
        assert tuner.poll() is None
        beat = tiny.only_run().heartbeat() if _has_run(tiny.runs) else None
    tuner.send_signal(signal.SIGKILL)
    tuner.wait()
    while tiny.only_run().status() == "running":
        time.sleep(0.1)
    assert tiny.only_run().status() == "lost"


def _has_run(runs: Path) -> bool:
    return any(runs.glob("*/run.json"))
