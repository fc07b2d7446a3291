"""Processes of a dry run: one that hangs, dies or raises is told of, the others are shown, and none is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from drivetrain.config import RunConfig, load_config
from drivetrain.engine.dry_run_fake import Counted
from drivetrain.engine.dry_run_formulas import Amount
from drivetrain.engine.dry_run_processes import Failure, RankTask, count_in_processes
from drivetrain.engine.parallel.traffic import Count
from drivetrain.errors import EnvironmentFault

ANSWER = Counted(
    parameters=Amount(3, 12),
    gradients=None,
    moments=Amount(6, 24),
    traffic={("tp", "all_reduce"): Count(2, 8)},
    parts=(("embedding.weight", (6, 1), ((0, 3), (0, 1))),),
)


def misbehave(config: RunConfig, world_size: int, task: RankTask) -> Counted:
    """Rank 1 hangs, rank 2 is killed, rank 3 has a bug, rank 4 lacks something, rank 5 leaves; the others answer."""
    assert world_size == 16
    if task.rank == 1:
        time.sleep(600)
    elif task.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    elif task.rank == 3:
        raise RuntimeError("a bug\nwith details")
    elif task.rank == 4:
        raise EnvironmentFault("something is missing")
    elif task.rank == 5:
        os._exit(7)
    return ANSWER


def write_pid_and_hang(config: RunConfig, world_size: int, task: RankTask) -> Counted:
    # The configuration is what a process is told; the folder travels in it.
    (Path(config.run.runs_dir) / str(task.rank)).write_text(str(os.getpid()))
    if task.rank:
        time.sleep(600)
    return ANSWER


def config_of(*overrides: str) -> RunConfig:
    return load_config("llama-2m", overrides).config


def answers_of(ranks: list[int], time_limit_s: float, done: list[int]) -> Mapping[int, Counted | Failure]:
    return count_in_processes(
        config_of(),
        16,
        [RankTask(rank, with_step=False) for rank in ranks],
        at_once=3,
        time_limit_s=time_limit_s,
        progress=done.append,
        work=misbehave,
    )


def test_a_rank_that_hangs_is_ended_when_its_time_is_up() -> None:
    done: list[int] = []
    assert answers_of([1], 0.5, done) == {1: Failure("it took longer than 0.5 s and was ended")}
    assert done == [1]


def test_ranks_that_fail_are_told_of_and_the_others_answer() -> None:
    done: list[int] = []
    answers = answers_of([2, 3, 4, 5, 6], 200.0, done)
    assert done == [1, 2, 3, 4, 5]
    assert answers[2] == Failure(
        "its process was ended by SIGKILL; the system does that when memory runs out"
    )
    bug = answers[3]
    assert isinstance(bug, Failure)
    assert bug.error == "RuntimeError: a bug"
    assert bug.traceback is not None
    assert "in misbehave" in bug.traceback
    assert answers[4] == Failure("something is missing")
    assert answers[5] == Failure("its process ended with exit code 7 and without a word")
    assert answers[6] == ANSWER


def test_an_interrupt_ends_every_process(tmp_path: Path) -> None:
    def interrupted(done: int) -> None:
        deadline = time.monotonic() + 300
        while sum(file.stat().st_size > 0 for file in tmp_path.iterdir()) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        count_in_processes(
            config_of(f"run.runs_dir={tmp_path}"),
            16,
            [RankTask(rank, with_step=False) for rank in range(3)],
            at_once=3,
            time_limit_s=600.0,
            progress=interrupted,
            work=write_pid_and_hang,
        )
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 3, "all of them were running"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def hang_on_three_ranks(folder: str) -> None:
    count_in_processes(
        config_of(f"run.runs_dir={folder}"),
        16,
        [RankTask(rank, with_step=False) for rank in (1, 2, 3)],
        at_once=3,
        time_limit_s=600.0,
        progress=lambda _: None,
        work=write_pid_and_hang,
    )


def is_running(pid: int) -> bool:
    """Not so of what has ended and waits for somebody to ask how."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_command_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    call = f"from {__name__} import hang_on_three_ranks; hang_on_three_ranks({str(tmp_path)!r})"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen([sys.executable, "-c", call], env={**os.environ, "PYTHONPATH": path}) as command:
        deadline = time.monotonic() + 300
        while sum(file.stat().st_size > 0 for file in tmp_path.iterdir()) < 3:
            assert command.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        command.kill()
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 3, "all of them were running"
    deadline = time.monotonic() + 300
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
