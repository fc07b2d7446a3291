"""However a run ends, it is a result. Real runs of the tiny model, each a process."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drivetrain.archive.reader import open_run
from drivetrain.tune.trainer import Attempt, CommandLineTrainer
from runs_on_the_spot import Tiny

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def trainer(tiny: Tiny, **settings) -> Iterator[CommandLineTrainer]:
    settings = {"environment": ENVIRONMENT, **settings}
    with CommandLineTrainer(tiny.folder / "logs", directory=tiny.folder, **settings) as made:
        yield made


def attempt_of(tiny: Tiny, overrides: list[str], *, timeout_s: float | None = None, **settings) -> Attempt:
    with trainer(tiny, **settings) as made:
        return made.train(tiny.file, overrides, timeout_s=timeout_s)


def test_a_run_that_finishes_is_known_with_its_summary(tiny: Tiny) -> None:
    attempt = attempt_of(tiny, ["training.train_iters=4", "run.name=mine"])
    assert attempt.outcome == "finished", attempt.message
    assert attempt.run is not None
    assert open_run(attempt.run).name == "mine"
    assert attempt.summary is not None
    assert attempt.summary["steps"] == 4
    assert attempt.elapsed_s > 0


def test_bad_input_is_refused_with_its_message(tiny: Tiny) -> None:
    attempt = attempt_of(tiny, ["training.global_batch_size=9"])
    assert (attempt.outcome, attempt.run, attempt.summary) == ("refused", None, None)
    assert "global_batch_size" in attempt.message


def test_running_out_of_memory_is_told_from_other_bad_input(tiny: Tiny) -> None:
    attempt = attempt_of(tiny, ["memory.device_memory_limit_bytes=1000"])
    assert attempt.outcome == "out_of_memory"
    assert "device_memory_limit_bytes = 1,000" in attempt.message


def test_a_diverged_run_is_told(tiny: Tiny) -> None:
    wild = [
        "optimizer.lr=10",
        "training.clip_grad=0",
        "optimizer.weight_decay=10",
        "training.train_iters=400",
    ]
    attempt = attempt_of(tiny, [*wild, "lr_schedule.lr_decay_style=constant"])
    assert attempt.outcome == "diverged", attempt.message
    assert "not finite" in attempt.message


@pytest.mark.long
def test_a_run_that_stands_still_is_a_hang(tiny: Tiny) -> None:
    (tiny.folder / "stuck.py").write_text(
        "import time\ndef stuck(ids):\n    time.sleep(1000)\n    return ids\n"
    )
    attempt = attempt_of(tiny, ["data.transform=stuck:stuck"], stall_s=8.0, grace_s=1.0)
    assert attempt.outcome == "hang"
    assert "no step, phase or message for 8 s" in attempt.message


@pytest.mark.long
def test_a_run_beyond_its_time_is_a_hang(tiny: Tiny) -> None:
    attempt = attempt_of(tiny, ["training.train_iters=1000000"], timeout_s=10.0, grace_s=20.0)
    assert attempt.outcome == "hang"
    assert "10 s" in attempt.message


def test_a_process_that_dies_is_a_crash(tiny: Tiny) -> None:
    (tiny.folder / "dying.py").write_text("import os\ndef die(ids):\n    os.abort()\n")
    attempt = attempt_of(tiny, ["data.transform=dying:die"])
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


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_runs_come_from_one_process_with_its_imports_done_as_long_as_it_would_be_the_same(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # As users start it: with threads for NumPy, if it likes.
    with trainer(tiny, environment={}) as made:
        first, second = (made.train(tiny.file, ["training.train_iters=1"]) for _ in range(2))
        assert [first.outcome, second.outcome] == ["finished", "finished"]
        assert first.run != second.run
        nursery = made._nursery._process
        assert nursery is not None, made._nursery.refused
        pids = [open_run(one.run).heartbeat()["pid"] for one in (first, second)]
        assert len({*pids, nursery.pid}) == 3
        os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "0"
        try:
            made._nursery.prepare()
        finally:
            del os.environ["TORCH_SHOW_CPP_STACKTRACES"]
        assert made._nursery._process.pid != nursery.pid


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_a_run_from_a_nursery_leads_a_session_of_its_own(tiny: Tiny) -> None:
    (tiny.folder / "telling.py").write_text(
        "import os, pathlib\ndef tell(ids):\n"
        "    pathlib.Path(__file__).with_suffix('.txt').write_text(f'{os.getsid(0)} {os.getpid()}')\n    return ids\n"
    )
    with trainer(tiny) as made:
        assert (
            made.train(tiny.file, ["training.train_iters=1", "data.transform=telling:tell"]).outcome
            == "finished"
        )
        assert made._nursery._process is not None
    session, process = (tiny.folder / "telling.txt").read_text().split()
    assert session == process, "what it starts could not be ended with it"


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_a_run_whose_nursery_is_killed_is_a_crash_and_the_next_run_is_started(tiny: Tiny) -> None:
    (tiny.folder / "killing.py").write_text(
        "import os, signal, time\ndef kill(ids):\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n    time.sleep(1000)\n    return ids\n"
    )
    with trainer(tiny) as made:
        attempt = made.train(tiny.file, ["data.transform=killing:kill"])
        assert attempt.outcome == "crash"
        assert "SIGKILL" in attempt.message
        assert made.train(tiny.file, ["training.train_iters=1"]).outcome == "finished"


def test_where_nothing_can_be_forked_a_run_imports_for_itself(tiny: Tiny) -> None:
    with trainer(tiny) as made:
        made._nursery.refused = "importing has started threads"
        assert made.train(tiny.file, ["training.train_iters=1"]).outcome == "finished"
        assert made._nursery._process is None


THREADED = """
import threading
from drivetrain.engine.nursery import no_forks
assert no_forks() is None, no_forks()
threading.Thread(target=threading.Event().wait, daemon=True).start()
assert "1 threads" in no_forks(), no_forks()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or torch.version.cuda is not None, reason="needs fork, and no GPU"
)
def test_a_process_with_threads_is_not_forked() -> None:
    # NumPy's OpenBLAS would start some of its own.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", THREADED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
