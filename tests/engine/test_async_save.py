"""Checkpoints that a thread writes: of the moment they were asked for, one after the other, whole or not at all."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.archive.reader import open_run
from drivetrain.catalogue.async_save import ENTRY
from drivetrain.config import LaunchFacts, load_config
from drivetrain.engine.checkpoint import (
    ALONE,
    Agreement,
    CheckpointSaver,
    agreement_over,
    find_latest,
    load_checkpoint,
    remove_leftovers,
    whole_state,
)
from drivetrain.engine.checkpoint import save as save_module
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.random_state import deterministic, seed_everything
from drivetrain.errors import EnvironmentFault
from drivetrain.measure.optimisation import Count, Observation
from rank_processes import on_ranks
from runs_on_the_spot import Tiny, losses_of
from tiny_training import LLAMA, OWN, Training, names, unexpected


def saver_of(
    training: Training, folder: Path, *, asynchronous: bool = True, agreement: Agreement = ALONE, **more: Any
) -> CheckpointSaver:
    return CheckpointSaver(
        folder, training.model, keep_latest_k=2, asynchronous=asynchronous, agreement=agreement, **more
    )


def save(saver: CheckpointSaver, training: Training) -> list[str]:
    state = whole_state(training.decoder, training.optimizer)
    return [saved.path.name for saved in saver.save(training.step, state, {"samples": 2 * training.step})]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writers wait for it."""
    event = threading.Event()
    write = save_module.Attempt.write

    def wait(attempt: save_module.Attempt) -> None:
        assert event.wait(60)
        write(attempt)

    monkeypatch.setattr(save_module.Attempt, "write", wait)
    return event


def test_it_is_the_state_at_the_time_of_the_save(tmp_path: Path, held: threading.Event) -> None:
    seed_everything(0, 0)
    training = Training(OWN)
    training.train(2)
    expected = {name: value.clone() for name, value in training.decoder.state_dict().items()}
    generators = torch.get_rng_state()
    saver = saver_of(training, tmp_path)
    assert save(saver, training) == []
    training.train(3)
    assert find_latest(tmp_path, unexpected) is None, "it is not whole yet"
    held.set()
    (saved,) = saver.finish()
    assert (saved.step, saved.path) == (2, tmp_path / "step-00000002")
    assert saved.write_s is not None
    loaded = Training(OWN, seed=9)
    state = whole_state(loaded.decoder, loaded.optimizer)
    found = load_checkpoint(saved.path, OWN, state)
    assert all(torch.equal(value, expected[name]) for name, value in loaded.decoder.state_dict().items())
    assert all(float(one.tensor) == 2 for name, one in state.optimizer.items() if name.endswith("/step")), (
        "the optimizer's counters are of that moment too"
    )
    assert found.random_state is not None
    assert torch.equal(found.random_state["torch_cpu"], generators)


def test_the_writer_takes_one_core_and_leaves_training_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, cores = save_module.Attempt.write, []

    def note(attempt: save_module.Attempt) -> None:
        cores.append(torch.get_num_threads())
        write(attempt)

    monkeypatch.setattr(save_module.Attempt, "write", note)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        training = Training(OWN)
        training.train(1)
        saver = saver_of(training, tmp_path)
        assert save(saver, training) == []
        assert len(saver.finish()) == 1
        assert (cores, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, held: threading.Event) -> None:
    training = Training(LLAMA)
    saver = saver_of(training, tmp_path)
    save(saver, training)
    training.step = 1
    told: list[list[str]] = []
    second = threading.Thread(target=lambda: told.append(save(saver, training)))
    second.start()
    second.join(0.3)
    assert second.is_alive(), "the former one is still being written"
    held.set()
    second.join(60)
    assert told == [["step-00000000"]]
    assert [saved.step for saved in saver.finish()] == [1]
    assert names(tmp_path) == ["step-00000000", "step-00000001"]


def test_a_finished_one_is_told_once(tmp_path: Path) -> None:
    training = Training(LLAMA)
    saver = saver_of(training, tmp_path)
    save(saver, training)
    told = None
    while told is None:
        told = saver.newly_whole()
    assert told.step == 0
    assert saver.newly_whole() is None
    assert saver.finish() == []


def test_a_thread_that_fails_leaves_the_former_checkpoint_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(LLAMA)
    saver = saver_of(training, tmp_path)
    save(saver, training)
    saver.finish()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(save_module, "write_part", full)
    training.step = 1
    save(saver, training)
    while not saver.failed:
        assert saver.newly_whole() is None
    training.step = 2
    with pytest.raises(EnvironmentFault, match=r"checkpoint of step 1 could not be saved.*No space left"):
        save(saver, training)
    assert names(tmp_path) == ["step-00000000"]


def test_the_loss_of_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    with deterministic(True):
        losses = []
        for asynchronous in (False, True):
            seed_everything(3, 0)
            training = Training(OWN)
            saver = saver_of(training, tmp_path / str(asynchronous), asynchronous=asynchronous)
            losses.append([])
            for _ in range(6):
                losses[-1] += training.train(2)
                save(saver, training)
            saver.finish()
    assert losses[0] == losses[1]
    for name in ("model/model.safetensors", "optimizer.safetensors", "random/r00000.safetensors"):
        one, other = (tmp_path / kind / "step-00000012" / name for kind in ("False", "True"))
        assert one.read_bytes() == other.read_bytes()


def test_a_bug_in_the_thread_is_raised_and_nothing_of_the_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(LLAMA)
    saver = saver_of(training, tmp_path)
    save(saver, training)
    saver.finish()
    monkeypatch.setattr(save_module, "write_part", _bug)
    training.step = 1
    save(saver, training)
    with pytest.raises(AssertionError, match=r"^$"):
        saver.finish()
    assert names(tmp_path) == ["step-00000000"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_old_checkpoints_that_cannot_be_removed_are_a_warning(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(save_module, "prune", refused)
    training = Training(LLAMA)
    warnings: list[str] = []
    saver = saver_of(training, tmp_path, asynchronous=asynchronous, warn=warnings.append)
    told = [*save(saver, training), *(saved.path.name for saved in saver.finish())]
    assert told == ["step-00000000"], "it is whole"
    assert find_latest(tmp_path, unexpected) == tmp_path / "step-00000000"
    (warning,) = warnings
    assert warning.startswith(
        f"the checkpoint of step 0 is saved, but older ones in {tmp_path} can't be removed"
    )
    assert "resource busy" in warning


def saves_on_ranks(folder: str, failing: int | None, bug: bool = False) -> list[str]:
    """On one of several ranks that hold the same: two saves while it trains; what was told."""
    ranks = Ranks.from_environment()
    seed_everything(0, 0)
    training = Training(LLAMA)
    told = []
    with join(ranks, "cpu", 1.0) as group:
        saver = saver_of(training, Path(folder), agreement=agreement_over(group))
        try:
            for _ in range(2):
                training.train(1)
                told += [saved.path.name for saved in saver.finish()]
                if ranks.rank == failing and training.step == 2:
                    save_module.write_part = _bug if bug else _full  # type: ignore[assignment]
                told += save(saver, training)
            told += [saved.path.name for saved in saver.finish()]
        except EnvironmentFault as fault:
            told.append(str(fault))
        except AssertionError as error:
            told.append(repr(error))
    return told


def _full(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _bug(*arguments: object) -> None:
    raise AssertionError


def test_ranks_write_their_parts_in_threads_of_their_own(tmp_path: Path) -> None:
    whole = ["step-00000001", "step-00000002"]
    assert on_ranks(saves_on_ranks, 3, str(tmp_path), None) == [whole] * 3
    assert find_latest(tmp_path, unexpected) == tmp_path / whole[1]
    training = Training(LLAMA, seed=5)
    load_checkpoint(tmp_path / whole[1], LLAMA, whole_state(training.decoder, training.optimizer))
    seed_everything(0, 0)
    expected = Training(LLAMA)
    expected.train(2)
    assert all(
        torch.equal(a, b)
        for a, b in zip(training.decoder.parameters(), expected.decoder.parameters(), strict=True)
    )


@pytest.mark.parametrize("failing", [0, 2])
def test_a_thread_that_fails_on_one_rank_is_heard_of_on_all(failing: int, tmp_path: Path) -> None:
    for told in on_ranks(saves_on_ranks, 3, str(tmp_path), failing):
        assert told[0] == "step-00000001"
        assert "step 2 could not be saved" in told[1]
        assert "No space left" in told[1] or "No such file" in told[1]
    # A rank that still wrote while another cleared away may leave an unfinished folder; the next start removes it.
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_bug_in_one_rank_s_thread_is_heard_of_on_all(failing: int, tmp_path: Path) -> None:
    told = on_ranks(saves_on_ranks, 3, str(tmp_path), failing, True)
    assert told.pop(failing) == ["step-00000001", "AssertionError()"], "as it was raised"
    for first, fault in told:
        assert first == "step-00000001"
        assert "step 2 could not be saved" in fault
        assert f"rank {failing}: AssertionError" in fault
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


KILLED_WHILE_WRITING = """
import os, signal, sys, threading
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from drivetrain.engine.checkpoint import save as save_module
from test_async_save import save, saver_of
from tiny_training import LLAMA, Training

training = Training(LLAMA)
saver = saver_of(training, Path({folder!r}))
save(saver, training)
saver.finish()
parts = 0
write_part = save_module.write_part

def killed(*arguments):
    global parts
    parts += 1
    if parts == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    write_part(*arguments)

save_module.write_part = killed
training.step = 1
save(saver, training)
while True:
    training.train(1)
"""


@pytest.mark.parametrize("at", [1, 9])
def test_kill_9_while_the_thread_writes_leaves_the_former_checkpoint(at: int, tmp_path: Path) -> None:
    code = KILLED_WHILE_WRITING.format(
        tests=str(Path(__file__).parents[1]), folder=str(tmp_path / "saved"), at=at
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert find_latest(tmp_path / "saved", unexpected) == tmp_path / "saved" / "step-00000000"
    assert len(remove_leftovers(tmp_path / "saved")) == 1
    assert names(tmp_path / "saved") == ["step-00000000"]


# Whole runs.


@pytest.mark.long
def test_a_run_saves_in_the_background_with_the_same_losses_and_continues(tiny: Tiny) -> None:
    settings = ["checkpoint.save_interval=3", "training.train_iters=10", "model.hidden_dropout=0.1"]
    plain = open_run(tiny.train(*settings)["run"])
    document = tiny.train(*settings, "checkpoint.async_save=true", options=["--nproc", "1"])
    run = open_run(document["run"])
    assert losses_of(run) == losses_of(plain)
    (record,) = [one for one in document["optimisations"] if one["name"] == "async_save"]
    assert (record["active"], record["reason"]) == (True, None)
    events = [event for event in run.events() if event["kind"] == "checkpoint"]
    assert [event["step"] for event in events] == [3, 6, 9, 10]
    assert all(event["write_s"] > 0 for event in events)
    kept = ["step-00000009", "step-00000010"]
    assert names(run.path / "checkpoints") == names(plain.path / "checkpoints") == kept


# The entry.


def observed(**ranges: Count) -> Observation:
    names_of = {"save": "drivetrain/checkpoint", "snapshot": "drivetrain/checkpoint/snapshot"}
    return Observation(num_steps=2, ranges={names_of[name]: count for name, count in ranges.items()})


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (observed(save=Count(1, 9), snapshot=Count(1, 3)), "shown"),
        (observed(save=Count(2, 9)), "absent"),
        (observed(), "unknown"),
        (Observation(num_steps=2, missing=frozenset({"ranges"})), "unknown"),
    ],
)
def test_evidence_is_the_copy_to_host_memory(seen: Observation, kind: str) -> None:
    config = load_config("llama-2m", ["checkpoint.async_save=true"]).config
    assert ENTRY.evidence(config, seen, None).kind == kind


@pytest.mark.parametrize(("interval", "moves"), [(0, False), (5, True), (20, False)])
def test_it_is_proposed_where_a_save_can_be_hidden(interval: int, moves: bool) -> None:
    config = load_config(
        "llama-2m", ["training.train_iters=20", f"checkpoint.save_interval={interval}"]
    ).config
    facts = LaunchFacts(world_size=1)
    assert (ENTRY.on(config, facts) is not None) == moves
    assert (ENTRY.applies(config, facts) is None) == moves
