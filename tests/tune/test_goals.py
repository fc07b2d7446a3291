"""A goal decides what a ladder keeps: tokens that carry loss, live bytes at a bounded speed, device time a token."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_goals import GoalRunner
from fake_runs import Climb, FakeGate, classes_of

from drivetrain.archive.tunes import Tune, open_tune
from drivetrain.cli.tune_goal import goal_of_options, share_of
from drivetrain.config import RunConfig
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.tune.goals import Goal
from drivetrain.tune.ladder_settings import LadderSettings
from drivetrain.tune.session import climb_tune, contract
from drivetrain.tune.trial_statistics import Noise, Side

ORDER: list[Side] = ["A", "B", "B", "A"]


@dataclass
class Scored:
    """A block."""

    step_s: float | None = 0.1
    mean_step_s: float | None = 0.1
    tokens_per_second: float | None = 1000.0
    effective_tokens_per_second: float | None = 800.0
    live_bytes: int | None = 1000
    processes: int = 2


def judged(goal: Goal, parents: list[Scored], candidates: list[Scored]) -> Any:
    a, b = iter(parents), iter(candidates)
    blocks = [next(a) if side == "A" else next(b) for side in ORDER]
    return goal.judge(ORDER, blocks, looks=1, confidence=0.95, noise=Noise())


def test_each_goal_has_a_score_of_which_more_is_better() -> None:
    block = Scored()
    assert Goal().score(block) == 1000
    assert Goal("effective_tokens").score(block) == 800
    assert Goal("memory").score(block) == pytest.approx(1 / 1000)
    assert Goal("cost").score(block) == 500


def test_figures_are_in_the_goals_unit() -> None:
    assert Goal("memory").figure(1 / 1000) == pytest.approx(1000)
    assert Goal("cost").figure(500) == pytest.approx(1 / 500)
    priced = Goal("cost", price_per_device_hour=3.6)
    assert priced.figure(500) == pytest.approx(2.0), (
        "a million tokens take 2000 device-seconds, at 3.6 an hour"
    )
    assert priced.unit == "price of a million tokens"


def test_what_a_block_lacks_is_said() -> None:
    assert "tagged" in str(Goal().lacks(Scored(tokens_per_second=None)))
    assert "not counted" in str(Goal("memory").lacks(Scored(live_bytes=None)))
    assert "carried loss" in str(Goal("effective_tokens").lacks(Scored(effective_tokens_per_second=None)))
    assert "carried loss" in str(Goal("effective_tokens").lacks(Scored(effective_tokens_per_second=0.0)))


def speeds(*of: float) -> list[Scored]:
    return [Scored(tokens_per_second=one, live_bytes=900) for one in of]


def test_less_memory_counts_only_where_the_speed_is_shown_to_hold() -> None:
    goal, parents = Goal("memory"), [Scored(), Scored(tokens_per_second=1001)]
    found, speed = judged(goal, parents, speeds(990, 991))
    assert (found.state, found.measured.ratio) == ("faster", pytest.approx(1000 / 900))
    assert speed.ratio == pytest.approx(0.99, abs=0.001)
    assert judged(goal, parents, speeds(900, 901))[0].state == "slower", "a tenth slower is not allowed"
    wide, _ = judged(goal, parents, speeds(930, 1010))
    assert wide.state == "undecided"
    assert "not shown to be fast enough" in wide.why
    assert judged(Goal("memory", slower_at_most=0.2), parents, speeds(900, 901))[0].state == "faster"


def test_what_was_lost_before_leaves_less_to_lose() -> None:
    parents = [Scored(), Scored(tokens_per_second=1001)]
    assert judged(Goal("memory").after(0.97), parents, speeds(970, 971))[0].state == "slower"
    assert judged(Goal("memory").after(1.2), parents, speeds(900, 901))[0].state == "faster"


def test_a_thousandth_of_memory_is_no_gain() -> None:
    parents = [Scored(), Scored()]
    found, _ = judged(Goal("memory"), parents, [Scored(live_bytes=999), Scored(live_bytes=999)])
    assert found.state in ("no gain", "undecided")
    assert judged(Goal("memory"), parents, parents)[0].state == "no gain"


# -- of a ladder ----------------------------------------------------------------------------------------------------


@pytest.fixture
def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Climb:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    return Climb(tmp_path)


def climbed(climb: Climb, runner: GoalRunner, *overrides: str, **settings: Any) -> Tune:
    path = climb.start(overrides, **settings)
    return climb_tune(path, runner=runner, gate=FakeGate(), say=climb.said.append)


def live_bytes(config: RunConfig) -> int:
    """bf16 takes a third off; the state in bf16 another part; recomputation half of what is left, dearly."""
    size = 1000 if config.precision.params_dtype == "fp32" else 700
    size -= 100 if config.precision.optimizer_state_dtype == "bf16" else 0
    return size // 2 if config.memory.recompute_granularity != "none" else size


def with_recomputation(config: RunConfig) -> dict[str, float]:
    again = 0.02 if config.memory.recompute_granularity != "none" else 0.0
    return {**classes_of(config), **({"recompute": again} if again else {})}


def test_memory_is_counted_in_each_block_and_what_is_too_slow_is_not_kept(climb: Climb) -> None:
    runner = GoalRunner(with_recomputation)
    runner.live = live_bytes
    only = ("bf16", "recompute", "fused_adamw")
    document = climbed(climb, runner, goal=Goal("memory"), only=only, device_type="cpu").document
    steps = {step["entry"]: step for step in document["steps"]}
    assert set(steps) == {"bf16", "recompute"}, "fused AdamW relieves nothing"
    assert steps["bf16"]["kept"]
    assert steps["bf16"]["measured"]["ratio"] == pytest.approx(1000 / 700)
    assert steps["bf16"]["speed"]["ratio"] == pytest.approx(0.1 / 0.085)
    first = document["steps"][0]
    assert first["entry"] == "recompute", "it is exact, and comes first"
    assert not steps["recompute"]["kept"], "a fifth slower"
    assert "slower than allowed" in steps["recompute"]["why"]
    assert steps["bf16"]["treats"] == ["activations"]
    goal = document["goal"]
    assert (goal["name"], goal["unit"], goal["baseline"], goal["final"]) == (
        "memory",
        "byte",
        pytest.approx(1000),
        pytest.approx(700),
    )
    assert document["speed_up"]["ratio"] == pytest.approx(0.1 / 0.085)
    assert contract(document)["goal"]["ratio"] == pytest.approx(1000 / 700)
    final = (climb.folder / "tunes" / document["tune"] / "configs" / "final.toml").read_text()
    assert "1.429x [1.429, 1.429] the inverse of the live bytes of its parent" in final
    assert "device_memory_limit_bytes = 92" not in final, (
        "the limit that makes a run count is none of the job's"
    )


def test_memory_is_bought_with_as_much_time_as_is_allowed_in_all(climb: Climb) -> None:
    runner = GoalRunner(with_recomputation)
    runner.live = live_bytes
    faster_first = climbed(
        climb, runner, goal=Goal("memory", slower_at_most=0.3), only=("bf16", "recompute"), device_type="cpu"
    ).document
    assert [step["kept"] for step in faster_first["steps"]] == [True, True]
    assert faster_first["goal"]["final"] == pytest.approx(350)


def test_a_layout_whose_live_bytes_cannot_be_counted_is_refused_at_once(climb: Climb) -> None:
    runner = GoalRunner()
    path = climb.start(("parallelism.zero_stage=1",), goal=Goal("memory"), world_size=2, device_type="cpu")
    with pytest.raises(ConfigurationError, match="--goal memory: its live bytes cannot be counted"):
        climb_tune(path, runner=runner, gate=FakeGate())
    assert runner.started == []


def test_tokens_that_carry_loss_are_what_packing_is_for(climb: Climb) -> None:
    def model(config: RunConfig) -> dict[str, float]:
        return {"compute.matmul": 0.05 if config.data.packing == "pad" else 0.0505, "compute.attention": 0.05}

    runner = GoalRunner(model)
    runner.effective = lambda config: 120.0 if config.data.packing == "pad" else 250.0
    document = climbed(
        climb, runner, "data.packing=pad", goal=Goal("effective_tokens"), only=("packing",)
    ).document
    (step,) = document["steps"]
    assert step["kept"], step["why"]
    assert step["measured"]["ratio"] == pytest.approx(250 / 120 * 0.1 / 0.1005)
    assert step["speed"]["ratio"] == pytest.approx(0.1 / 0.1005), "slower, in tokens of any kind"
    assert document["goal"]["final"] == pytest.approx(250 / 0.1005)
    plain = climbed(climb, runner, "data.packing=pad", only=("packing",)).document
    assert not plain["steps"][0]["kept"]


def test_a_resumed_tune_keeps_its_goal(climb: Climb) -> None:
    runner = GoalRunner()
    runner.live = live_bytes
    goal = Goal("memory", slower_at_most=0.1)
    path = climb.start((), goal=goal, only=("bf16",), device_type="cpu")

    def interrupt() -> None:
        if len(runner.started) == 3:
            runner.before = lambda: None
            raise KeyboardInterrupt

    runner.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        climb_tune(path, runner=runner, gate=FakeGate())
    assert LadderSettings.from_document(open_tune(path).document["settings"]).goal == goal
    done = climb_tune(path, runner=runner, gate=FakeGate()).document
    assert done["goal"]["slower_at_most"] == 0.1
    assert done["goal"]["final"] == pytest.approx(700)


def test_settings_from_before_there_were_goals_are_of_speed() -> None:
    document = LadderSettings(60.0).to_document()
    del document["goal"], document["device_type"]
    assert LadderSettings.from_document(document).goal == Goal()


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("memry", None, None), "did you mean memory"),
        (("speed", None, None), "one of tokens_per_second"),
        ((None, "5%", None), "belongs to --goal memory"),
        (("memory", None, 2.0), "belongs to --goal cost"),
        (("cost", None, -1.0), "a positive number"),
        (("memory", "fast", None), "expected a share"),
        (("memory", "5", None), "nearest: 5%"),
        (("memory", "-1%", None), "nearest: 0%"),
    ],
)
def test_a_goal_that_makes_no_sense_is_answered_with_the_nearest(given: Any, message: str) -> None:
    with pytest.raises(DrivetrainError, match=message):
        goal_of_options(*given)


def test_shares_are_written_either_way() -> None:
    assert share_of("--slower-at-most", "5%") == share_of("--slower-at-most", "0.05") == pytest.approx(0.05)
    assert goal_of_options(None, None, None) == Goal()
    assert goal_of_options("memory", "10%", None).least_speed == pytest.approx(1 / 1.1)
