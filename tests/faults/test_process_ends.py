"""Processes that end in the middle: ranks, launcher, readers of the output. One message, nothing left running."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RunWriter
from drivetrain.cli import train_command
from drivetrain.cli.train_command import new_run
from drivetrain.config import load_config
from drivetrain.engine.failures import explain
from drivetrain.errors import EnvironmentFault
from drivetrain.monitor import Console, StepInfo
from runs_on_the_spot import Tiny


def processes_of(tiny: Tiny, word: str) -> list[int]:
    """Processes of ``tiny``'s runs whose command line holds ``word``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(tiny.runs) in command and word in command:
                found.append(int(entry.name))
    return sorted(found)


def start_two(tiny: Tiny, *overrides: str) -> "subprocess.Popen[bytes]":
    process = tiny.start("train", str(tiny.file), "training.train_iters=100000", *overrides, "--nproc", "2")
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if any(path.stat().st_size > 2000 for path in tiny.runs.glob("*/segments/0000/metrics.jsonl")):
            return process
        time.sleep(0.02)
    process.kill()
    raise AssertionError(process.communicate()[1].decode())


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.long
def test_a_killed_rank_ends_the_run_with_one_message(tiny: Tiny) -> None:
    process = start_two(tiny)
    ranks = [pid for pid in processes_of(tiny, "drivetrain\0train") if pid in processes_of(tiny, "-u\0-m")]
    os.kill(ranks[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    message = errors.decode()
    assert process.returncode == 2, message
    assert "was ended by SIGKILL" in message
    assert message.count("error:") == 1
    assert "Traceback" not in message
    assert processes_of(tiny, "") == []


@pytest.mark.long
def test_when_the_launcher_is_killed_the_ranks_save_and_end(tiny: Tiny) -> None:
    process = start_two(tiny)
    process.kill()
    deadline = time.monotonic() + 150
    while processes_of(tiny, "") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.communicate(timeout=240)
    assert processes_of(tiny, "") == [], "nothing trains on that nobody waits for"
    run = tiny.only_run()
    assert run.status() == "interrupted"
    assert list((run.path / "checkpoints").glob("step-*"))


def test_a_signal_while_a_run_is_set_up_ends_it_in_order(tiny: Tiny) -> None:
    process = tiny.start("train", str(tiny.file), "training.train_iters=100000")
    deadline = time.monotonic() + 600
    while not list(tiny.runs.glob("*/run.json")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors.decode()
    for path in tiny.runs.iterdir():
        assert open_run(path).status() == "interrupted"


@pytest.fixture
def as_in_the_command() -> Iterator[None]:
    """A signal raises KeyboardInterrupt, as the command line has it before a run holds signals."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)


def in_order(tiny: Tiny) -> bool:
    (end,) = [event for event in tiny.only_run().events() if event["kind"] == "end"]
    return (end["status"], end["reason"]) == ("interrupted", "SIGTERM before the first step")


@pytest.mark.usefixtures("as_in_the_command")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_between_making_a_run_and_training_it_ends_it_in_order(
    world_size: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_and_signalled(*given: Any) -> Path:
        path = new_run(*given)
        signal.raise_signal(signal.SIGTERM)
        return path

    monkeypatch.setattr(train_command, "new_run", made_and_signalled)
    with pytest.raises(KeyboardInterrupt):
        train_command.train_new_run(load_config(str(tiny.file), ["training.micro_batch_size=2"]), world_size)
    assert in_order(tiny)
    assert signal.getsignal(signal.SIGTERM).__name__ == "interrupt", "signals are given back"


@pytest.mark.usefixtures("as_in_the_command")
def test_a_signal_while_a_new_run_is_closed_is_not_lost(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    close = RunWriter.close

    def signalled(writer: RunWriter) -> None:
        close(writer)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(RunWriter, "close", signalled)
    with pytest.raises(KeyboardInterrupt):
        new_run(load_config(str(tiny.file), []), 1)
    assert in_order(tiny)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("mfu", "llama2-7b", "--step-time", "1", "--peak-flops", "1e15"), 0),
        (("check", "llama-2m", "--json"), 0),
        (("runs", "list", "--json"), 0),
        (("check", "llama-2m", "training.global_batch_size=7", "--json"), 1),
    ],
)
def test_a_reader_that_has_gone_changes_no_answer(
    arguments: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        check=False,
        timeout=600,
    )
    os.close(write)
    assert done.stderr == b""
    assert done.returncode in (0, code)


def test_output_that_finds_no_room_is_an_error_in_words(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "drivetrain", "check", "llama-2m", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            check=False,
            timeout=600,
        )
    assert done.returncode == 2
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_run_does_not_die_of_a_log_that_nobody_reads() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    info = StepInfo(step=1, total_steps=2, samples=1, global_batch_size=1, metrics={}, tags=())
    with Console(2, Gone()) as console:
        console.say("a line")
        console.step(info)


def test_memory_that_runs_out_is_explained() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.float64)
    meaning = explain(caught.value)
    assert isinstance(meaning, EnvironmentFault)
    assert "out of memory" in str(meaning)
    assert "out of memory" in str(explain(MemoryError()))


def test_an_unknown_error_is_not_explained_away() -> None:
    assert "another process" in str(explain(RuntimeError("Application timeout caused pair closure")))
    assert explain(RuntimeError("shapes do not match")) is None
    assert explain(ValueError("can't allocate memory")) is None
