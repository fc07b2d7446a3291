"""A ladder that is killed at any write of its state goes on from there: nothing finished is repeated, same result."""

import os
from pathlib import Path
from typing import Any

import pytest
from fake_runs import Climb, FakeGate, FakeRunner

from drivetrain.archive import tunes
from drivetrain.archive.tunes import hold_tune, open_tune
from drivetrain.errors import RunError
from drivetrain.tune.session import climb_tune

SETTINGS: dict[str, Any] = {
    "only": ("data_workers", "bf16", "fused_adamw"),
    "knob_trials": 2,
    "trial_steps": 4,
}


class Killed(BaseException):
    """The process is gone: nobody catches it."""


@pytest.fixture
def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Climb:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # Nobody pulls the plug here.
    return Climb(tmp_path)


def without_places(value: Any) -> Any:
    """A document without what differs between any two tunes: names of runs."""
    if isinstance(value, dict):
        return {
            key: without_places(item) for key, item in value.items() if key not in ("run", "tune", "created")
        }
    return [without_places(item) for item in value] if isinstance(value, list) else value


def of_results(document: Any) -> dict[str, Any]:
    """What a ladder found."""
    return without_places({key: document[key] for key in document if key not in ("machine", "directory")})


def writes_of(
    climb: Climb, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, dict[str, Any], list[tuple[str, str]]]:
    """Number of writes of the state of an undisturbed ladder, its results, and its runs."""
    count = 0
    write = tunes.write_json

    def counting(path: Path, document: Any) -> None:
        nonlocal count
        count += 1
        write(path, document)

    runner = FakeRunner()
    path = climb.start(**SETTINGS)
    monkeypatch.setattr(tunes, "write_json", counting)
    done = climb_tune(path, runner=runner, gate=FakeGate())
    monkeypatch.setattr(tunes, "write_json", write)
    return count, of_results(done.document), runner.started


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_at_every_write_of_its_state_it_ends_the_same_and_repeats_nothing(
    climb: Climb, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, expected, once = writes_of(climb, monkeypatch)
    assert count > 15
    write = tunes.write_json
    for at in range(count - 1):
        before = at % 2 == 0
        seen = 0

        def killing(path: Path, document: Any, at: int = at, before: bool = before) -> None:
            nonlocal seen
            seen += 1
            if seen - 1 == at and before:
                raise Killed
            write(path, document)
            if seen - 1 == at:
                raise Killed

        runner = FakeRunner()
        path = climb.start(**SETTINGS)
        monkeypatch.setattr(tunes, "write_json", killing)
        with pytest.raises(Killed):
            climb_tune(path, runner=runner, gate=FakeGate())
        monkeypatch.setattr(tunes, "write_json", write)
        assert open_tune(path).status() == "lost"
        done = climb_tune(path, runner=runner, gate=FakeGate())
        assert of_results(done.document) == expected, f"killed at write {at}"
        # Where the kill came before the write, the piece (eight blocks at most) is done again; else nothing is.
        again = len(runner.started) - len(once)
        assert again <= (8 if before else 0), f"killed at write {at}"


@pytest.mark.timeout(1800)
@pytest.mark.long
def test_killed_in_every_run_it_ends_the_same(climb: Climb, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected, once = writes_of(climb, monkeypatch)
    for at in range(0, len(once), 7):
        runner = FakeRunner()
        calls = iter(range(10**6))

        def maybe(at: int = at, calls: Any = calls) -> None:
            if next(calls) == at:
                raise Killed

        runner.before = maybe
        path = climb.start(**SETTINGS)
        with pytest.raises(Killed):
            climb_tune(path, runner=runner, gate=FakeGate())
        done = climb_tune(path, runner=runner, gate=FakeGate())
        assert of_results(done.document) == expected


def test_an_interrupt_is_saved_and_the_ladder_goes_on(climb: Climb, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected, once = writes_of(climb, monkeypatch)
    runner = FakeRunner()
    path = climb.start(**SETTINGS)

    def interrupt() -> None:
        if len(runner.started) == 12:
            runner.before = lambda: None
            raise KeyboardInterrupt

    runner.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        climb_tune(path, runner=runner, gate=FakeGate())
    stopped = open_tune(path)
    assert stopped.status() == "interrupted"
    assert "drivetrain tune" in stopped.document["reason"]
    done = climb_tune(path, runner=runner, gate=FakeGate())
    assert of_results(done.document) == expected
    assert len(runner.started) < 2 * len(once)


def test_two_tuners_on_one_state_are_refused(climb: Climb) -> None:
    path = climb.start(**SETTINGS)
    with hold_tune(path):
        assert open_tune(path).status() == "running"
        with pytest.raises(RunError, match="another process is working on"):
            climb_tune(path, runner=FakeRunner(), gate=FakeGate())


def test_a_finished_tune_is_not_climbed_again(climb: Climb) -> None:
    done = climb(**{**SETTINGS, "only": ("fused_adamw",)})
    with pytest.raises(RunError, match="is finished"):
        climb_tune(done.path, runner=FakeRunner(), gate=FakeGate())


def test_a_tune_of_another_machine_is_not_continued(climb: Climb, monkeypatch: pytest.MonkeyPatch) -> None:
    path = climb.start(**SETTINGS)
    monkeypatch.setattr("drivetrain.tune.session.cpu_model", lambda: "another processor")
    with pytest.raises(RunError, match="another machine"):
        climb_tune(path, runner=FakeRunner(), gate=FakeGate())


def test_more_budget_takes_a_stopped_ladder_further(climb: Climb) -> None:
    whole = climb(**SETTINGS).document
    runner = FakeRunner()
    path = climb.start(**SETTINGS)

    def interrupt() -> None:
        if len(runner.started) == 20:
            runner.before = lambda: None
            raise KeyboardInterrupt

    runner.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        climb_tune(path, budget_s=300.0, runner=runner, gate=FakeGate())
    done = climb_tune(path, budget_s=86400.0, runner=runner, gate=FakeGate())
    assert [step["change"] for step in done.document["steps"]] == [step["change"] for step in whole["steps"]]
