"""A ladder that is killed at any write of its state goes on from there: nothing finished is repeated, same result."""

import contextlib
import json
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


def undisturbed(climb: Climb, settings: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The results of an undisturbed ladder, and its runs."""
    runner = FakeRunner()
    return of_results(climb(runner, **settings).document), runner.started


@pytest.mark.long
def test_killed_before_and_after_every_write_of_its_state_it_ends_the_same_and_repeats_only_what_was_not_written(
    climb: Climb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ladder that is resumed after every kill: each state is killed once before it is written and once after."""
    # A search, an entry after it, both removed once, and the end: every kind of piece.
    settings = {**SETTINGS, "only": ("data_workers", "fused_adamw")}
    expected, once = undisturbed(climb, settings)
    write = tunes.write_json
    seen: dict[str, int] = {}

    def killing(path: Path, document: Any) -> None:
        state = json.dumps(of_results(document), sort_keys=True)
        seen[state] = seen.get(state, 0) + 1
        if seen[state] == 1:
            raise Killed
        write(path, document)
        if seen[state] == 2:
            raise Killed

    runner = FakeRunner()
    path = climb.start(**settings)
    monkeypatch.setattr(tunes, "write_json", killing)
    kills = 0
    while open_tune(path).document["status"] != "finished":
        with contextlib.suppress(Killed):
            climb_tune(path, runner=runner, gate=FakeGate())
        kills += 1
        assert open_tune(path).status() in ("lost", "finished")
    assert of_results(open_tune(path).document) == expected
    # States that are there already are written again by whoever resumes, and then nobody is killed.
    assert kills == 2 * len(seen)
    assert len(seen) > 15
    # A piece is written once it is finished: what was killed before that is done again, and nothing else.
    assert len(runner.started) == 2 * len(once)


@pytest.mark.long
def test_killed_within_every_piece_it_ends_the_same(climb: Climb) -> None:
    """One ladder that is killed once in each of its pieces, in their first or in their second run by turns."""
    expected, once = undisturbed(climb, SETTINGS)
    runner = FakeRunner()
    path = climb.start(**SETTINGS)
    killed: dict[int, int] = {}
    under_way: dict[int, int] = {}

    def maybe() -> None:
        pieces = len(open_tune(path).document["pieces"])
        under_way[pieces] = under_way.get(pieces, 0) + 1
        if pieces not in killed and under_way[pieces] == 1 + pieces % 2:
            killed[pieces] = under_way[pieces] - 1
            raise Killed

    runner.before = maybe
    kills = 0
    while open_tune(path).document["status"] != "finished":
        with contextlib.suppress(Killed):
            climb_tune(path, runner=runner, gate=FakeGate())
        kills += 1
    assert kills == len(killed) + 1
    assert len(killed) > 15
    document = open_tune(path).document
    assert of_results(document) == expected
    assert len(runner.started) == len(once) + sum(killed.values())


def test_an_interrupt_is_saved_and_the_ladder_goes_on(climb: Climb) -> None:
    expected, once = undisturbed(climb, SETTINGS)
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
