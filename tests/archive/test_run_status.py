"""The status of a run is derived from its end event and its heartbeat, and never stored."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.atomic import write_json
from drivetrain.archive.heartbeat import Heartbeat, is_alive, process_identity
from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RunWriter
from drivetrain.errors import RunError

MakeRun = Callable[..., RunWriter]


def beat(path: Path, **changes: Any) -> None:
    document = {"schema": 1, "step": 5, "phase": "train", "time": time.time(), **process_identity()}
    write_json(path / "heartbeat.json", document | changes, fsync=False)


def test_a_run_without_any_sign_of_life_is_lost(make_run: MakeRun) -> None:
    path = make_run().path
    (path / "heartbeat.json").unlink()
    assert open_run(path).status() == "lost"


def test_a_run_that_was_just_made_is_running_while_its_maker_lives(make_run: MakeRun) -> None:
    path = make_run().path
    assert open_run(path).status() == "running"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as maker:
        beat(path, phase="created", **process_identity(maker.pid))
        # The maker waits for this process, which trains.
        RunWriter.resume(path).close()
        beat(path, phase="train", **process_identity(maker.pid))
        with pytest.raises(RunError, match="still running"):
            RunWriter.resume(path)
        maker.communicate(b"\n")


def test_a_run_whose_maker_died_before_training_is_lost(make_run: MakeRun) -> None:
    path = make_run().path
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as maker:
        beat(path, phase="created", **process_identity(maker.pid))
        maker.communicate(b"\n")
    assert open_run(path).status() == "lost"


@pytest.mark.parametrize("status", ["finished", "failed", "interrupted", "killed"])
def test_the_end_event_decides_even_while_the_process_lives(make_run: MakeRun, status: str) -> None:
    writer = make_run()
    writer.open_segment(1)
    beat(writer.path)
    run = open_run(writer.path)
    assert run.status() == "running"
    writer.event("end", status=status, reason="why")
    assert run.status() == status
    end = run.end()
    assert end is not None
    assert end["reason"] == "why"


def test_a_run_that_fails_before_its_first_segment_has_failed(make_run: MakeRun) -> None:
    writer = make_run()
    writer.event("end", status="failed", reason="no corpus")
    assert open_run(writer.path).status() == "failed"


def test_a_restart_that_fails_before_its_segment_ends_the_run(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)
    writer.event("end", status="interrupted", reason="SIGINT")
    writer.close()
    with RunWriter.resume(writer.path) as second:
        second.event("end", status="failed", reason="the checkpoint is damaged")
    assert open_run(writer.path).status() == "failed"
    with RunWriter.resume(writer.path) as third:
        third.open_segment(2)
        beat(writer.path)
        assert open_run(writer.path).status() == "running"


def test_a_resumed_run_is_running_again(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)
    writer.event("end", status="interrupted", reason="SIGINT")
    writer.close()
    resumed = RunWriter.resume(writer.path)
    with Heartbeat(writer.path):
        resumed.open_segment(4)
        assert open_run(writer.path).status() == "running"
        resumed.event("end", status="finished", reason=None)
        assert open_run(writer.path).status() == "finished"


def test_a_tag_does_not_change_the_status(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)
    writer.event("end", status="finished", reason=None)
    writer.event("tag", tag="good", action="add")
    assert open_run(writer.path).status() == "finished"


@pytest.mark.parametrize(("age", "status"), [(5.0, "running"), (29.0, "running"), (31.0, "lost")])
def test_the_age_of_the_heartbeat_decides_for_another_machine(
    make_run: MakeRun, age: float, status: str
) -> None:
    path = make_run().path
    beat(path, host="another-machine", time=time.time() - age)
    assert open_run(path).status() == status


@pytest.mark.parametrize("key", ["process_start", "process_place"])
def test_the_age_decides_where_processes_cannot_be_told_apart(make_run: MakeRun, key: str) -> None:
    path = make_run().path
    for age, status in ((5.0, "running"), (31.0, "lost")):
        beat(path, time=time.time() - age, **{key: None})
        assert open_run(path).status() == status


def test_a_living_process_is_running_however_old_its_heartbeat(make_run: MakeRun) -> None:
    path = make_run().path
    beat(path, time=time.time() - 3600)
    assert open_run(path).status() == "running"


def test_a_pid_that_was_given_to_another_process_is_not_the_run(make_run: MakeRun) -> None:
    path = make_run().path
    start = process_identity()["process_start"]
    if start is None:
        pytest.skip("processes have no start time without /proc")
    beat(path, process_start=start - 1)
    assert open_run(path).status() == "lost"


TRAINING = """
import sys, time
from drivetrain.archive.heartbeat import Heartbeat
from drivetrain.archive.writer import RunWriter
writer = RunWriter.resume(sys.argv[1])
with Heartbeat(writer.path, step=0):
    writer.open_segment(1)
    step = 0
    while True:
        step += 1
        writer.log_metrics(step, {"train/loss": 1.0})
        if step == 3:
            print("going", flush=True)
        time.sleep(0.001)
"""


def test_a_killed_process_is_lost_at_once_and_its_steps_are_kept(make_run: MakeRun) -> None:
    writer = make_run()
    writer.close()
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(writer.path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        run = open_run(writer.path)
        assert run.status() == "running"
        with pytest.raises(RunError, match=f"still running .process {process.pid}"):
            RunWriter.resume(writer.path)
    finally:
        process.send_signal(signal.SIGKILL)
        # Not yet waited for: a zombie is dead, too.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert run.status() == "lost"
    with process:
        pass
    assert run.status() == "lost"
    assert [line["step"] for line in run.metrics()][:3] == [1, 2, 3]
    RunWriter.resume(writer.path).close()


class TestHeartbeat:
    def test_says_where_the_loop_is_and_who_runs_it(self, make_run: MakeRun) -> None:
        run = open_run(make_run().path)
        heartbeat = Heartbeat(run.path, step=3, phase="compile", interval=60)
        first = run.heartbeat()
        assert first is not None
        assert (first["step"], first["phase"]) == (3, "compile")
        assert (first["pid"], first["host"]) == (os.getpid(), socket.gethostname())
        assert first["schema"] == 1
        heartbeat.update(step=4)
        heartbeat.update(phase="train")
        heartbeat.stop()
        last = run.heartbeat()
        assert last is not None
        assert (last["step"], last["phase"]) == (4, "train")
        assert last["time"] >= first["time"]

    def test_is_renewed_by_its_thread_and_no_more_after_stop(self, make_run: MakeRun) -> None:
        run = open_run(make_run().path)
        heartbeat = Heartbeat(run.path, interval=0.005)
        heartbeat.update(step=9)
        deadline = time.monotonic() + 600
        while (run.heartbeat() or {})["step"] != 9:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        heartbeat.stop()
        heartbeat.stop()
        heartbeat.update(step=10)
        assert (run.heartbeat() or {})["step"] == 9
        assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]

    def test_that_cannot_be_written_is_told_once_and_training_goes_on(self, tmp_path: Path) -> None:
        said: list[str] = []
        heartbeat = Heartbeat(tmp_path / "gone", interval=0.001, on_fault=said.append)
        heartbeat.update(step=1)
        (tmp_path / "gone").mkdir()
        deadline = time.monotonic() + 600
        while not (tmp_path / "gone" / "heartbeat.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        heartbeat.stop()
        assert len(said) == 1
        assert "no heartbeat" in said[0]
        assert "does not exist" in said[0]

    def test_leaves_one_file(self, tmp_path: Path) -> None:
        with Heartbeat(tmp_path, interval=0.001):
            time.sleep(0.02)
        assert [path.name for path in tmp_path.iterdir()] == ["heartbeat.json"]

    def test_of_this_process_is_alive(self) -> None:
        assert is_alive(process_identity()) is True
        assert is_alive(process_identity() | {"host": "another"}) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": 1}', b'{"schema": 1, "time": "x"}'])
def test_a_heartbeat_that_a_power_cut_damaged_is_none_and_the_run_can_be_continued(
    make_run: MakeRun, content: bytes
) -> None:
    path = make_run().path
    (path / "heartbeat.json").write_bytes(content)
    assert open_run(path).heartbeat() is None
    assert open_run(path).status() == "lost"
    RunWriter.resume(path).close()


def test_of_two_that_continue_a_run_at_the_same_moment_one_is_refused(make_run: MakeRun) -> None:
    path = make_run().path
    first = RunWriter.resume(path)
    with pytest.raises(RunError, match="two processes cannot continue one run"):
        RunWriter.resume(path)
    first.close()
    RunWriter.resume(path).close()
