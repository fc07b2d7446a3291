"""What was saved, by accounts of the processes that measured it: a wrong account shows, a drifting machine does not."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import Climb, FakeGate, FakeRunner, classes_of

from drivetrain.archive.tunes import Tune, open_tune, save_tune
from drivetrain.cli.tune_command import Options, run_replay
from drivetrain.config import RunConfig, load_config
from drivetrain.report.html_page import html_page
from drivetrain.report.ladder_report import tune_report
from drivetrain.report.markdown import markdown
from drivetrain.tune.saved_seconds import CONFIDENCE, difference_of, why_withheld
from drivetrain.tune.session import climb_tune, contract
from drivetrain.tune.trainer import Attempt, Outcome

BASELINE_S = 0.100
FINAL_S = 0.090


@pytest.fixture
def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Climb:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # Nobody pulls the plug here.
    return Climb(tmp_path)


def tuned(climb: Climb, runner: FakeRunner, **settings: Any) -> Tune:
    return climb(runner, **{"only": ("fused_adamw",), **settings})


def started(runner: FakeRunner, beginning: str) -> list[tuple[str, str]]:
    return [(verb, name) for verb, name in runner.started if name.startswith(beginning)]


# -- the interval -------------------------------------------------------------------------------------------------


def test_the_interval_is_welchs() -> None:
    found = difference_of([5.0, 7.0], [2.0, 4.0])
    # Equal variances of two blocks each: two degrees of freedom; Student's t at 0.975 from a table.
    half = 4.30265 * math.sqrt(2 / 2 + 2 / 2)
    assert (found.value, found.low, found.high) == pytest.approx((3.0, 3 - half, 3 + half), rel=1e-5)
    # A side without spread brings no degree of freedom.
    alone = difference_of([5.0, 7.0], [3.0, 3.0])
    assert alone.high - alone.value == pytest.approx(12.7062 * 1.0, rel=1e-5)


def test_a_final_step_counts_by_the_share_of_its_tokens() -> None:
    found = difference_of([5.0, 7.0], [2.0, 4.0], 0.5)
    assert found.value == pytest.approx(4.5)
    shares = np.array([1.0, 0.25])
    freedom = shares.sum() ** 2 / (shares**2).sum()
    assert 1 < freedom < 2, "between that of one side and that of both"
    assert 4.30265 < (found.high - found.value) / math.sqrt(1.25) < 12.7062


@pytest.mark.parametrize(("blocks", "spread"), [(2, 1.0), (4, 1.0), (4, 8.0), (8, 0.2)])
def test_the_interval_covers_the_truth_as_often_as_the_confidence_says(blocks: int, spread: float) -> None:
    draw = np.random.default_rng(blocks)
    trials, covered = 300, 0
    for _ in range(trials):
        found = difference_of(draw.normal(3, 1, blocks).tolist(), draw.normal(1, spread, blocks).tolist())
        covered += found.low <= 2 <= found.high
    # Four deviations of a binomial count; with two blocks a side Welch's interval errs on the wide side.
    allowed = 4 * math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / trials)
    assert covered / trials > CONFIDENCE - allowed


# -- the comparison -----------------------------------------------------------------------------------------------


def test_the_blocks_of_the_final_trial_alone_carry_windows_and_the_seconds_agree(climb: Climb) -> None:
    runner = FakeRunner()
    document = tuned(climb, runner).document
    saved = document["saved"]
    assert saved["withheld"] is None
    assert saved["seconds_per_step"] == pytest.approx(BASELINE_S - FINAL_S)
    assert saved["account_seconds_per_step"] == pytest.approx(BASELINE_S - FINAL_S, rel=1e-6)
    assert (saved["agreement"], saved["blocks"]) == ("agree", 8)
    assert saved["deviation_low"] <= saved["deviation"] <= saved["deviation_high"]
    assert abs(saved["deviation"]) < 1e-6
    assert saved["classes"] == pytest.approx({"compute.optimizer": 0.010}, rel=1e-6)
    assert saved["treated"] == {"classes": ["compute.optimizer"], "seconds_per_step": pytest.approx(0.010)}
    # The profiler's 25% stand beside it: of what was recorded, and of what it cost.
    assert saved["profiled_seconds_per_step"] == pytest.approx(1.25 * 0.010)
    assert saved["overhead_seconds_per_step"] == pytest.approx(0.25 * 0.010)
    assert saved["unexplained_seconds_per_step"] == pytest.approx(0)
    assert [verb for verb, _ in started(runner, "trial-")] == ["train"] * 4
    assert [name for _, name in started(runner, "final-trial")] == [
        f"final-trial-{side}" for side in "abbabaab"
    ]
    assert {verb for verb, _ in started(runner, "final-trial")} == {"profile"}
    assert contract(document)["saved"] == json.loads(json.dumps(saved))


def test_a_windows_steps_are_in_no_figure_of_the_trial(climb: Climb) -> None:
    document = tuned(climb, FakeRunner()).document
    for block in document["final_trial"]["blocks"]:
        step_s = BASELINE_S if block["side"] == "A" else FINAL_S
        assert block["steps"] == 4
        assert block["mean_step_s"] == pytest.approx(step_s)
        assert block["peak_memory_bytes"] is None, "the profiler's own memory is in it"
        assert block["window"]["steps"] == 5
        assert block["window"]["plain_steps"] == 12
        assert block["window"]["profiled_step_s"] == pytest.approx(1.25 * step_s)


def test_final_blocks_know_their_parents_run(climb: Climb) -> None:
    runner = FakeRunner()
    document = tuned(climb, runner).document
    first = document["final_trial"]["blocks"][0]["run"]
    assert runner.options[-8:] == [["--parent", first] if side == "B" else [] for side in "ABBABAAB"]


def test_accounts_that_are_shown_are_of_processes_that_were_measured(climb: Climb) -> None:
    def model(config: RunConfig) -> dict[str, float]:
        # Something else used the machine while the first profile was taken.
        scale = 3.0 if config.run.name == "baseline" else 1.0
        return {name: seconds * scale for name, seconds in classes_of(config).items()}

    document = tuned(climb, FakeRunner(model)).document
    assert document["saved"]["agreement"] == "agree"
    assert document["baseline"]["step_s"] == pytest.approx(BASELINE_S)
    assert document["final"]["step_s"] == pytest.approx(FINAL_S)
    assert document["baseline"]["classes"]["data.loader"] == pytest.approx(1.25e9 * 0.040)
    runs = {block["run"]: block["side"] for block in document["final_trial"]["blocks"]}
    assert (runs[document["baseline"]["run"]], runs[document["final"]["run"]]) == ("A", "B")


@pytest.mark.parametrize(
    "factors", [(1.0, 1.4, 0.8, 1.2, 0.9, 1.3, 1.0, 0.7), tuple(1.05**number for number in range(8))]
)
def test_a_machine_whose_speed_wanders_between_blocks_moves_nothing(
    climb: Climb, factors: tuple[float, ...]
) -> None:
    runner = FakeRunner()

    def model(config: RunConfig) -> dict[str, float]:
        final = (config.run.name or "").startswith("final-trial")
        scale = factors[len(started(runner, "final-trial")) - 1] if final else 1.0
        return {name: seconds * scale for name, seconds in classes_of(config).items()}

    runner.model = model
    document = tuned(climb, runner, only=("data_workers", "fused_adamw"), leave_one_out=False).document
    saved = document["saved"]
    blocks = [block["mean_step_s"] for block in document["final_trial"]["blocks"]]
    assert max(blocks[0::3]) / min(blocks[0::3]) > 1.01, "it did wander"
    assert saved["agreement"] == "agree"
    assert max(abs(saved[key]) for key in ("deviation", "deviation_low", "deviation_high")) < 1e-6
    low, high = saved["class_intervals"]["data.loader"]
    assert high - low > 0.01 * saved["classes"]["data.loader"], (
        "of single classes the seconds are of the machine"
    )


def without(name: str) -> Callable[[dict[str, int]], dict[str, int]]:
    return lambda classes: {one: ns for one, ns in classes.items() if one != name}


def twice(name: str) -> Callable[[dict[str, int]], dict[str, int]]:
    return lambda classes: {one: ns * (2 if one == name else 1) for one, ns in classes.items()}


@pytest.mark.parametrize(
    ("told", "sign"), [(without("compute.optimizer"), -1), (twice("compute.optimizer"), 1)]
)
def test_a_wrong_account_deviates_and_is_a_finding(
    climb: Climb, told: Callable[[dict[str, int]], dict[str, int]], sign: int
) -> None:
    runner = FakeRunner()
    runner.told = lambda classes: told(classes) if started(runner, "final-trial") else classes
    document = tuned(climb, runner).document
    saved = document["saved"]
    # The class holds the whole gain: without it the account knows of none, and twice of two.
    assert saved["deviation"] == pytest.approx(sign, rel=1e-6)
    assert saved["agreement"] == "differ"
    assert any("the account does not explain what was saved" in one for one in document["findings"])
    assert saved["unexplained_seconds_per_step"] == pytest.approx(0.0125 if sign < 0 else 0)


def test_a_wrong_account_of_what_no_change_touched_moves_nothing(climb: Climb) -> None:
    runner = FakeRunner()
    runner.told = without("data.loader")
    saved = tuned(climb, runner).document["saved"]
    assert abs(saved["deviation"]) < 1e-6, "it is missing on both sides"


def test_a_process_that_wanders_within_itself_makes_the_interval_wide(climb: Climb) -> None:
    class Wandering(FakeRunner):
        def step_s(self, config: RunConfig, step: int, step_s: float) -> float:
            # Steps before the window are slower than measured ones in some blocks, and faster in others.
            beside = (config.run.name or "").startswith("final-trial") and 7 < step < 14
            return step_s * (1 + 0.06 * (len(self.started) % 3 - 1)) if beside else step_s

    saved = tuned(climb, Wandering()).document["saved"]
    assert saved["agreement"] == "undecided"
    assert saved["deviation_low"] < 0 < saved["deviation_high"]


def test_a_longer_step_counts_with_the_tokens_of_a_step_of_the_baseline(climb: Climb) -> None:
    from drivetrain.tune.saved_seconds import saved

    window = {"steps": 5, "profiled_step_s": 1.0, "plain_step_s": 1.0, "plain_steps": 12}
    sides = {"A": (3.0, {"compute.matmul": 3e9}), "B": (4.0, {"compute.matmul": 4e9})}
    blocks = [
        {
            "side": side,
            "mean_step_s": sides[side][0],
            "window": {**window, "classes": sides[side][1]},
        }
        for side in "ABBA"
    ]
    found = saved({"blocks": blocks}, steps=10, world_size=2, final_share=0.5)
    assert found["seconds_per_step"] == found["account_seconds_per_step"] == 1.0
    assert found["classes"] == {"compute.matmul": 1.0}
    assert found["device_hours_per_run"] == pytest.approx(10 * 2 / 3600)
    assert "as many tokens" in found["rule"]


# -- withheld -----------------------------------------------------------------------------------------------------


def untraced(climb: Climb) -> Tune:
    runner = FakeRunner()
    runner.traces = lambda config: config.run.name != "final-trial-b"
    return tuned(climb, runner)


def test_a_block_without_an_account_is_named_and_nothing_is_compared(climb: Climb) -> None:
    document = untraced(climb).document
    saved = document["saved"]
    assert saved["withheld"].startswith(
        "block 2 of the final trial, of the final configuration, has no account, and 3 more: there is no account of "
        "profiled steps in "
    )
    assert [saved[key] for key in ("account_seconds_per_step", "deviation", "classes", "agreement")] == [
        None
    ] * 4
    # What was measured without the profiler stays.
    assert saved["seconds_per_step"] == pytest.approx(BASELINE_S - FINAL_S)
    assert document["final"] is not None


def test_every_page_and_the_terminal_say_the_sentence_instead_of_a_deviation(
    climb: Climb, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = untraced(climb)
    sentence = tune.document["saved"]["withheld"].partition(" in /")[0]
    shown = Options(None, str(tune.path.parent), (), True, None, False, None, None, None, None)
    assert run_replay(tune.id, (), shown, as_json=False) == 0
    report = tune_report(open_tune(tune.path))
    for text in (capsys.readouterr().out, html_page(report), markdown(report)):
        assert sentence in text
        assert "of what was measured" not in text


def test_every_page_and_the_terminal_say_the_deviation_with_its_interval_and_the_classes(
    climb: Climb, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = tuned(climb, FakeRunner())
    shown = Options(None, str(tune.path.parent), (), True, None, False, None, None, None, None)
    assert run_replay(tune.id, (), shown, as_json=False) == 0
    report = tune_report(open_tune(tune.path))
    for text in (capsys.readouterr().out, html_page(report), markdown(report)):
        assert "of what was measured" in text
        assert re.search(r"\[[+-]0\.0%, [+-]0\.0%\\?\] in 8 blocks: they agree", text)
        assert "saved in compute.optimizer" in text


def test_without_room_in_the_budget_a_single_change_is_shown_by_its_own_trial(climb: Climb) -> None:
    class Slow(FakeRunner):
        def profile(self, config: Path, overrides: Any, **options: Any) -> Attempt:
            attempt = super().profile(config, overrides, **options)
            is_long = "run.name=profile-1" in overrides
            return dataclasses.replace(attempt, elapsed_s=500.0) if is_long else attempt

    runner = Slow()
    document = tuned(climb, runner, budget_s=545.0).document
    assert document["spent_s"] <= 545.0
    assert started(runner, "final-trial") == []
    assert document["saved"]["withheld"].startswith("the budget left no room")
    assert document["final_trial"]["blocks"] == document["steps"][0]["blocks"]
    assert document["final"] is not None


@pytest.mark.parametrize("outcome", ["out_of_memory", "crash"])
def test_a_block_that_fails_with_its_window_withdraws_the_whole(climb: Climb, outcome: Outcome) -> None:
    runner = FakeRunner(
        failures=lambda config: (
            (outcome, "no room for a trace") if config.run.name == "final-trial-b" else None
        )
    )
    document = tuned(climb, runner).document
    assert (document["final"], document["saved"]) == (None, None)
    (said,) = [one for one in document["findings"] if "withdrawn" in one]
    assert "no room for a trace" in said


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


def test_killed_in_the_final_trial_it_ends_the_same(climb: Climb) -> None:
    runner = FakeRunner()
    path = killed(climb, runner, lambda one: len(started(one, "final-trial")) == 3)
    done = climb_tune(path, runner=runner, gate=FakeGate()).document
    undisturbed = tuned(climb, FakeRunner(), only=("fused_adamw", "data_workers"), leave_one_out=False)
    assert done["saved"] == undisturbed.document["saved"]


def test_a_final_trial_of_an_earlier_version_is_taken_as_it_is_and_compared_with_nothing(
    climb: Climb,
) -> None:
    runner = FakeRunner()
    path = killed(climb, runner, lambda one: len(started(one, "final-trial")) == 8)
    document = open_tune(path).document
    (piece,) = [one for one in document["pieces"] if one["piece"].startswith("final-trial ")]
    for block in piece["result"]["blocks"]:
        del block["window"], block["no_window"]
    for entry in document["pieces"]:
        if "steps_s" in entry["result"]:
            entry["result"].update(mean_plain_step_s=0.1, plain_steps=32)
    save_tune(path, document)
    done = climb_tune(path, runner=runner, gate=FakeGate()).document
    assert done["saved"]["withheld"] == "no block of the trial carried a profiled window"
    assert done["saved"]["seconds_per_step"] > 0
    assert len(started(runner, "final-trial")) == 8, "nothing finished is repeated"
    final = load_config(str(path / done["final"]["config"])).config
    assert final.data.num_workers == 1
    assert why_withheld({"blocks": []}) is None
