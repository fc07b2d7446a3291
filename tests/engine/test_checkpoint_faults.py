"""Checkpoints are whole or absent: full disks, processes killed while saving, several ranks."""

import errno
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from drivetrain.engine.checkpoint import (
    damage,
    find_latest,
    load_checkpoint,
    remove_leftovers,
    whole_state,
)
from drivetrain.engine.checkpoint import save as save_module
from drivetrain.engine.checkpoint.agreement import Agreement
from drivetrain.errors import EnvironmentFault
from tiny_training import LLAMA, OWN, Training, names, save_two_checkpoints, unexpected


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with sound checkpoints of steps 1 and 2."""
    save_two_checkpoints(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["save_file", "write_part", "seal", "publish", "describe_folder"])
def test_a_full_disk_leaves_the_former_checkpoints_and_says_how_many_bytes_lack(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    training = Training(LLAMA)
    training.save(tmp_path)
    training.step = 3
    monkeypatch.setattr(f"drivetrain.engine.checkpoint.save.{name}", full)
    with pytest.raises(
        EnvironmentFault, match=r"No space left on device.*needs [\d,]+ bytes, [\d,]+ bytes are free"
    ):
        training.save(tmp_path, keep_latest_k=1)
    assert names(tmp_path) == ["step-00000000"]
    assert find_latest(tmp_path, unexpected) == tmp_path / "step-00000000"


def test_room_is_looked_for_before_anything_is_written(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage())
    training = Training(OWN)
    training.step = 3
    with pytest.raises(EnvironmentFault, match=r"no room.*1,000 bytes are free"):
        training.save(saved)
    assert names(saved) == ["step-00000001", "step-00000002"]


WRITER = f"""
import resource, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch
torch.set_num_threads(1)
from drivetrain.errors import EnvironmentFault
from tiny_training import OWN, Training
"""


def run_python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_write_that_the_system_refuses_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    process = run_python(
        f"""
folder = Path({str(tmp_path)!r})
training = Training(OWN)
training.save(folder)
training.step = 1
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
try:
    training.save(folder)
except EnvironmentFault as fault:
    print(fault)
"""
    )
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "File too large" in output
    assert names(tmp_path) == ["step-00000000"]
    assert find_latest(tmp_path, unexpected) == tmp_path / "step-00000000"


KILLED_AT_EVERY_FILE_OPERATION = """
import os, shutil, signal
from drivetrain.engine.checkpoint import find_latest, remove_leftovers

def kill_at(operation):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if any(isinstance(argument, (str, Path)) and str(argument).startswith(str(work)) for argument in arguments):
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def save_in_a_child(operation):
    pid = os.fork()
    if pid == 0:
        kill_at(operation)
        training.save(work, keep_latest_k=1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def unexpected(path, reason):
    raise AssertionError(f"killed at {operation}: {path} is damaged: {reason}")

training = Training(OWN)
origin, work = folder / "origin", folder / "work"
for training.step in (1, 2):
    training.save(origin)
training.step = new_step
outcomes, operation, status = set(), 0, 1
while status != 0:
    operation += 1
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(origin, work)
    status = save_in_a_child(operation)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    assert find_latest(work, unexpected) is not None
    remove_leftovers(work)
    newest = find_latest(work, unexpected)
    assert newest.name in ("step-00000002", "step-00000003"), newest
    assert not list(work.glob(".*")), list(work.iterdir())
    outcomes.add((newest.name, status == 0))
print(operation, sorted(outcomes))
"""


@pytest.mark.parametrize("new_step", [2, 3])
def test_kill_9_at_every_file_operation_of_a_save_leaves_a_sound_checkpoint(
    new_step: int, tmp_path: Path
) -> None:
    code = f"folder = Path({str(tmp_path)!r})\nnew_step = {new_step}\n" + KILLED_AT_EVERY_FILE_OPERATION
    process = run_python(code)
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    operations, outcomes = output.split(" ", 1)
    assert int(operations) > 20
    new = f"step-{new_step:08d}"
    # Some kills come before the rename that counts, some (while pruning) after it; the last round has none.
    assert outcomes.strip() == str(sorted({("step-00000002", False), (new, False), (new, True)}))


def test_leftovers_of_dead_processes_go_and_those_of_live_ones_stay(saved: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead = saved / f".tmp-step-00000003-{process.pid}-0a"
    replaced = saved / f".old-step-00000001-{process.pid}-0a"
    live = saved / ".tmp-step-00000003-1-0a"
    for path in (dead, replaced, live):
        path.mkdir()
        (path / "state.json").write_text("{}")
    assert remove_leftovers(saved) == [replaced, dead]
    assert names(saved) == [live.name, "step-00000001", "step-00000002"]
    assert remove_leftovers(saved / "missing") == []


class ThreadAgreement:
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[bytes]) -> None:
        self.rank = rank
        self.size = barrier.parties
        self._barrier = barrier
        self._table = table

    def gather(self, message: bytes) -> list[bytes]:
        self._table[self.rank] = message
        self._barrier.wait()
        told = list(self._table)
        self._barrier.wait()
        return told


def on_ranks(world_size: int, work: Callable[[Agreement], object]) -> list[object]:
    """Run ``work(agreement)`` on threads; returns what each returned or raised."""
    barrier = threading.Barrier(world_size, timeout=240)
    table = [b""] * world_size
    results: list[object] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadAgreement(rank, barrier, table))
        except EnvironmentFault as fault:
            results[rank] = fault

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_every_rank_keeps_its_own_generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(range(3))
    monkeypatch.setattr(
        "drivetrain.engine.checkpoint.save.capture_random_state",
        lambda: {"torch_cpu": torch.tensor([next(states)])},
    )
    training = [Training(OWN, seed=7) for _ in range(3)]
    paths = on_ranks(3, lambda agreement: training[agreement.rank].save(tmp_path, agreement=agreement))
    path = tmp_path / "step-00000000"
    assert paths == [path] * 3
    assert damage(path) is None

    def load(agreement: Agreement) -> int:
        one = training[agreement.rank]
        loaded = load_checkpoint(path, OWN, whole_state(one.decoder, one.optimizer), agreement=agreement)
        assert loaded.random_state is not None
        return int(loaded.random_state["torch_cpu"])

    kept = on_ranks(3, load)
    assert sorted(kept) == [0, 1, 2]


def test_another_number_of_ranks_has_no_generators_to_continue_from(saved: Path) -> None:
    def load(agreement: Agreement) -> tuple[object, int, int]:
        training = Training(OWN)
        state = whole_state(training.decoder, training.optimizer)
        loaded = load_checkpoint(saved / "step-00000002", OWN, state, agreement=agreement)
        return loaded.random_state, loaded.step, loaded.world_size

    assert on_ranks(2, load) == [(None, 2, 1)] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all_of_them(
    failing: int, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(temporary: Path, rank: int, state: Mapping[str, torch.Tensor]) -> None:
        if rank == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(temporary, rank, state)

    write = save_module._write_random_state
    monkeypatch.setattr(save_module, "_write_random_state", full)
    training = [Training(OWN) for _ in range(2)]
    # The step exists already, so a rank can't take the folder of that name for the new checkpoint.
    for one in training:
        one.step = 2

    results = on_ranks(2, lambda agreement: training[agreement.rank].save(saved, agreement=agreement))
    assert all(isinstance(result, EnvironmentFault) for result in results), results
    assert all(f"rank {failing}: [Errno 28] No space left" in str(result) for result in results)
    assert names(saved) == ["step-00000001", "step-00000002"]
    assert find_latest(saved, unexpected) == saved / "step-00000002"
