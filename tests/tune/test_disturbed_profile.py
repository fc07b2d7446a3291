"""A profile of another state of the machine than the trial's is recognised, taken again, and else not compared."""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import Climb, FakeGate, FakeRunner, classes_of

from drivetrain.archive.tunes import Tune, open_tune, save_tune
from drivetrain.cli.tune_command import Options, run_replay
from drivetrain.config import RunConfig
from drivetrain.report.html_page import html_page
from drivetrain.report.ladder_report import tune_report
from drivetrain.report.markdown import markdown
from drivetrain.tune.profile_state import CONFIDENCE, expected_of, state_of
from drivetrain.tune.session import climb_tune, contract
from drivetrain.tune.trainer import Attempt

BASELINE_S = 0.100
FINAL_S = 0.090


@pytest.fixture
def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Climb:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # Nobody pulls the plug here.
    return Climb(tmp_path)


def trial(a: list[float], b: list[float], steps: int = 16) -> dict[str, Any]:
    sides = [("A", one) for one in a] + [("B", one) for one in b]
    return {"blocks": [{"side": side, "mean_step_s": seconds, "steps": steps} for side, seconds in sides]}


# -- the rule -----------------------------------------------------------------------------------------------------


def test_the_interval_is_that_of_one_more_block_by_students_t() -> None:
    a, b = [0.100, 0.110], [0.050, 0.052]
    found = expected_of(trial(a, b), "A", steps=16)
    assert found is not None
    squares = math.log(0.110 / 0.100) ** 2 / 2 + math.log(0.052 / 0.050) ** 2 / 2
    assert found.deviation == pytest.approx(math.sqrt(squares / 2))
    # Student's t at 0.9875 with two degrees of freedom, from a table.
    half = 6.2054 * math.sqrt(squares / 2) * math.sqrt(1 + 1 / 2)
    assert math.log(found.step_s) == pytest.approx(math.log(0.100 * 0.110) / 2)
    assert math.log(found.high_s / found.step_s) == pytest.approx(half, rel=1e-4)
    assert math.log(found.step_s / found.low_s) == pytest.approx(half, rel=1e-4)
    assert found.blocks == 2


def test_a_mean_of_fewer_steps_than_a_blocks_may_vary_more_and_one_of_more_steps_does_not_vary_less() -> None:
    blocks = trial([0.100, 0.110], [0.050, 0.052], steps=64)
    widths = {}
    for steps in (16, 64, 1000):
        found = expected_of(blocks, "A", steps)
        assert found is not None
        widths[steps] = math.log(found.high_s / found.step_s)
    assert widths[16] / widths[64] == pytest.approx(math.sqrt((4 + 1 / 2) / (1 + 1 / 2)))
    assert widths[1000] == widths[64]


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_one_more_block_lies_inside_as_often_as_the_confidence_says(blocks: int) -> None:
    draw = np.random.default_rng(blocks)
    trials, inside = 1000, 0
    for _ in range(trials):
        logs = draw.normal(0, 0.05, 2 * blocks + 1)
        times = np.exp(logs) * 0.1
        found = expected_of(trial(times[1 : blocks + 1].tolist(), times[blocks + 1 :].tolist()), "A", 16)
        assert found is not None
        inside += found.low_s <= times[0] <= found.high_s
    # Four deviations of a binomial count.
    allowed = 4 * math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / trials)
    assert abs(inside / trials - CONFIDENCE) < allowed


def test_blocks_without_spread_tell_nothing_apart_below_one_percent() -> None:
    even = trial([0.1, 0.1], [0.05, 0.05])
    assert state_of("run", 0.1009, 32, even, "A").answer == "alike"
    assert state_of("run", 0.1011, 32, even, "A").answer == "other"
    assert state_of("run", 0.0989, 32, even, "A").answer == "other"


@pytest.mark.parametrize(
    ("mean", "steps", "blocks", "why"),
    [
        (0.1, 32, trial([0.1], [0.05]), "too few blocks"),
        (0.1, 32, trial([], [0.05, 0.06]), "too few blocks"),
        (None, None, trial([0.1, 0.1], [0.05, 0.05]), "nothing is known of its steps without the profiler"),
        (0.1, None, trial([0.1, 0.1], [0.05, 0.05]), "nothing is known of its steps without the profiler"),
    ],
)
def test_where_nothing_can_be_compared_the_state_is_unknown(
    mean: float | None, steps: int | None, blocks: dict[str, Any], why: str
) -> None:
    found = state_of("run", mean, steps, blocks, "A")
    assert found.answer == "unknown"
    assert why in found.in_words


def test_one_block_of_a_side_is_enough_where_the_other_side_knows_how_blocks_vary() -> None:
    found = expected_of(trial([0.1], [0.05, 0.051]), "A", 16)
    assert found is not None
    assert found.high_s > found.step_s * math.exp(12 * found.deviation), "one degree of freedom"


# -- the ladder ---------------------------------------------------------------------------------------------------


def slowed(profiles: dict[str, float]) -> FakeRunner:
    """Profiles of these names are taken while something else makes every step so many times as long."""

    def model(config: RunConfig) -> dict[str, float]:
        scale = profiles.get(config.run.name or "", 1.0)
        return {name: seconds * scale for name, seconds in classes_of(config).items()}

    return FakeRunner(model)


def profiles_of(runner: FakeRunner) -> list[str]:
    return [name for verb, name in runner.started if verb == "profile"]


def tuned(climb: Climb, runner: FakeRunner, **settings: Any) -> Tune:
    return climb(runner, **{"only": ("fused_adamw",), **settings})


def test_an_undisturbed_profile_is_compared_and_taken_once(climb: Climb) -> None:
    runner = FakeRunner()
    saved = tuned(climb, runner).document["saved"]
    assert saved["withheld"] is None
    assert abs(saved["deviation"]) < 1e-6
    assert saved["account_chance_seconds"] == pytest.approx(math.hypot(BASELINE_S, FINAL_S) * 0.01, rel=0.01)
    assert {key: one["answer"] for key, one in saved["profiles"].items()} == {
        "baseline": "alike",
        "final": "alike",
    }
    assert profiles_of(runner) == ["baseline", "profile-1"]


def test_a_disturbed_baseline_is_profiled_again_and_the_new_profile_is_what_is_compared_and_shown(
    climb: Climb,
) -> None:
    runner = slowed({"baseline": 3.0})
    document = tuned(climb, runner).document
    saved = document["saved"]
    assert profiles_of(runner) == ["baseline", "profile-1", "baseline-again-1"]
    assert (saved["withheld"], saved["profiles"]["baseline"]["answer"]) == (None, "alike")
    assert abs(saved["deviation"]) < 1e-6
    attempts = saved["profiles"]["baseline"]["attempts"]
    assert [one["answer"] for one in attempts] == ["other", "alike"]
    assert attempts[0]["mean_step_s"] == pytest.approx(3 * BASELINE_S)
    assert document["baseline"]["step_s"] == pytest.approx(BASELINE_S)
    assert "baseline-again-1" in document["baseline"]["run"]
    (said,) = [one for one in document["findings"] if "taken 2 times" in one]
    assert "took 300.0 ms in the mean" in said
    assert "expect 99.0 to 101.0 ms" in said


def test_a_disturbed_profile_of_the_final_configuration_is_taken_again_too(climb: Climb) -> None:
    runner = slowed({"profile-2": 0.5, "final-again-1": 1.2})
    document = tuned(climb, runner, only=("fused_adamw", "data_workers"), leave_one_out=False).document
    assert profiles_of(runner)[-2:] == ["final-again-1", "final-again-2"]
    assert document["saved"]["withheld"] is None
    assert "final-again-2" in document["final"]["run"]
    assert [one["answer"] for one in document["saved"]["profiles"]["final"]["attempts"]] == [
        "other",
        "other",
        "alike",
    ]


def disturbed_throughout() -> FakeRunner:
    return slowed({"baseline": 9.0, "baseline-again-1": 4.0, "baseline-again-2": 6.0})


def test_a_profile_that_stays_disturbed_is_not_compared_and_the_sentence_says_why(climb: Climb) -> None:
    runner = disturbed_throughout()
    document = tuned(climb, runner).document
    saved = document["saved"]
    assert profiles_of(runner) == ["baseline", "profile-1", "baseline-again-1", "baseline-again-2"]
    assert saved["withheld"] == (
        "the profile of the baseline does not stand for the trial, its 32 steps without the profiler took 400.0 ms in "
        "the mean, where the 2 blocks of that configuration let one expect 99.0 to 101.0 ms (the nearest of 3 "
        "profiles); tune again while nothing else uses the machine"
    )
    withheld = ("account_seconds_per_step", "account_chance_seconds", "deviation", "classes")
    assert [saved[key] for key in withheld] == [None] * 4
    # What was measured without the profile stays.
    assert saved["seconds_per_step"] == pytest.approx(BASELINE_S - FINAL_S)
    assert document["final"] is not None
    assert document["baseline"]["run"].endswith("baseline") or "-baseline-" in document["baseline"]["run"]
    assert contract(document)["saved"] == saved
    assert json.loads(json.dumps(contract(document)))["saved"]["withheld"] == saved["withheld"]


def test_every_page_and_the_terminal_say_the_sentence_instead_of_a_deviation(
    climb: Climb, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = tuned(climb, disturbed_throughout())
    sentence = tune.document["saved"]["withheld"]
    shown = Options(None, str(tune.path.parent), (), True, None, False, None, None, None, None)
    assert run_replay(tune.id, (), shown, as_json=False) == 0
    report = tune_report(open_tune(tune.path))
    for text in (capsys.readouterr().out, html_page(report), markdown(report)):
        assert sentence in text
        assert "of what was measured" not in text


def test_without_room_in_the_budget_it_is_not_taken_again_and_that_is_said(climb: Climb) -> None:
    class Slow(FakeRunner):
        def profile(self, config: Path, overrides: Any, **options: Any) -> Attempt:
            attempt = super().profile(config, overrides, **options)
            is_long = "run.name=profile-1" in overrides
            return dataclasses.replace(attempt, elapsed_s=500.0) if is_long else attempt

    runner = Slow(slowed({"baseline": 3.0}).model)
    document = tuned(climb, runner, budget_s=700.0).document
    assert profiles_of(runner) == ["baseline", "profile-1"]
    assert document["spent_s"] <= 700.0
    assert "; the budget left no room to take it again; tune again" in document["saved"]["withheld"]


def test_a_profile_that_cannot_be_taken_again_is_said(climb: Climb) -> None:
    class Failing(FakeRunner):
        def profile(self, config: Path, overrides: Any, **options: Any) -> Attempt:
            if any("baseline-again-" in one for one in overrides):
                return Attempt("crash", None, "no room", 1.0, None)
            return super().profile(config, overrides, **options)

    document = tuned(climb, Failing(slowed({"baseline": 9.0}).model)).document
    assert "ended as crash: no room" in document["saved"]["withheld"]
    assert document["final"] is not None


def test_blocks_that_vary_allow_a_profile_to_vary_as_much(climb: Climb) -> None:
    class Uneven(FakeRunner):
        def step_s(self, config: RunConfig, step: int, step_s: float) -> float:
            # The mean moves, the median does not: a step of each block is slow, in every second one very slow.
            slow = 1.5 if len(self.started) % 2 else 1.3
            return step_s * (slow if step == 5 else 1.0)

    found = {}
    for scale in (1.15, 2.0):
        runner = Uneven(slowed({"baseline": scale}).model)
        found[scale] = tuned(climb, runner).document["saved"]["profiles"]["baseline"]["attempts"][0]
    assert found[1.15]["answer"] == "alike", "beyond a percent, within what the blocks vary"
    assert found[2.0]["answer"] == "other"


# -- states from before, and interrupted ones -----------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone: nobody catches it."""


def killed(climb: Climb, runner: FakeRunner, at: Callable[[FakeRunner], bool]) -> Path:
    """A tune that was killed before the first run at which ``at`` holds."""
    path = climb.start(only=("fused_adamw", "data_workers"), leave_one_out=False)

    def maybe() -> None:
        if at(runner):
            raise Killed

    runner.before = maybe
    with pytest.raises(Killed):
        climb_tune(path, runner=runner, gate=FakeGate())
    runner.before = lambda: None
    return path


def made_before(path: Path) -> list[Path]:
    """Take from the state what versions before this did not keep; runs of its profiles."""
    document = open_tune(path).document
    profiles = [entry["result"] for entry in document["pieces"] if "steps_s" in entry["result"]]
    assert len(profiles) == 3
    for result in profiles:
        del result["mean_plain_step_s"], result["plain_steps"]
    save_tune(path, document)
    return [Path(result["run"]) for result in profiles]


def at_the_last_trial(runner: FakeRunner) -> bool:
    return len(profiles_of(runner)) == 3


def test_a_state_from_before_goes_on_with_what_its_runs_tell(climb: Climb) -> None:
    runner = slowed({"baseline": 3.0})
    path = killed(climb, runner, at_the_last_trial)
    made_before(path)
    saved = climb_tune(path, runner=runner, gate=FakeGate()).document["saved"]
    assert [one["answer"] for one in saved["profiles"]["baseline"]["attempts"]] == ["other", "alike"]
    assert saved["profiles"]["final"]["steps"] == 32
    assert profiles_of(runner)[3:] == ["baseline-again-1"], "nothing finished is repeated"


def test_a_state_from_before_whose_runs_are_gone_ends_and_compares_nothing(climb: Climb) -> None:
    runner = FakeRunner()
    path = killed(climb, runner, at_the_last_trial)
    shutil.rmtree(made_before(path)[-1])
    document = climb_tune(path, runner=runner, gate=FakeGate()).document
    assert document["status"] == "finished"
    assert document["saved"]["withheld"] == (
        "nothing tells whether the profile of the final configuration stands for the trial, nothing is known of its "
        "steps without the profiler; tune again"
    )
    assert document["saved"]["deviation"] is None


def test_killed_while_a_profile_is_taken_again_it_ends_the_same(climb: Climb) -> None:
    runner = disturbed_throughout()
    path = killed(climb, runner, lambda one: profiles_of(one)[-1:] == ["baseline-again-1"])
    saved = climb_tune(path, runner=runner, gate=FakeGate()).document["saved"]
    assert profiles_of(runner).count("baseline-again-1") == 1
    undisturbed = tuned(
        climb, disturbed_throughout(), only=("fused_adamw", "data_workers"), leave_one_out=False
    )
    assert saved["withheld"] == undisturbed.document["saved"]["withheld"]
