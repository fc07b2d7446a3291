"""Layouts are proposed by a rule that says its numbers: legal ones, the most promising first, gated as round-off."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_goals import GoalRunner
from fake_runs import Climb, FakeGate

from drivetrain.archive.tunes import Tune
from drivetrain.config import RunConfig, load_config
from drivetrain.measure.account import Account, RankAccount, StepAccount, Window
from drivetrain.tune.gate_change import tier_of_change
from drivetrain.tune.goals import Goal
from drivetrain.tune.layouts import Shape, expected_step, processes_of, propose_layouts, shape_of, state_bytes
from drivetrain.tune.moves import Change, changed
from drivetrain.tune.session import climb_tune

BASE = load_config("llama-2m", ["training.micro_batch_size=2"]).config


def account_of(classes: Mapping[str, int]) -> Account:
    whole = sum(classes.values())
    window = Window(
        window_ns=whole,
        classes=dict(classes),
        unexplained_ns=0,
        **dict.fromkeys(
            (
                "busy_ns",
                "idle_ns",
                "compute_ns",
                "communication_ns",
                "overlapped_communication_ns",
                "exposed_communication_ns",
                "copy_ns",
                "exposed_copy_ns",
            )
        ),
    )
    step = StepAccount(step=1, window=window, start_ns=0, end_ns=whole, first=False)
    return Account(health=(), ranks=(RankAccount(rank=0, view="host", whole=window, steps=(step,)),))


BUSY_WIRE = {
    "compute.matmul": 60_000_000,
    "compute.optimizer": 20_000_000,
    "communication.dp.transfer": 20_000_000,
}


def proposals(
    account: Account | None = None, config: RunConfig = BASE, processes: int = 2, **more: Any
) -> Any:
    return propose_layouts(config, processes, account, **{"legal": lambda _leaves: None, **more})


def test_what_expects_no_gain_is_not_proposed_and_its_numbers_are_said() -> None:
    found, rejected = proposals(account_of(BUSY_WIRE))
    names = [one.name for one in found]
    shared = found[names.index("dp2-zero1")]
    assert [one.place for one in found] == list(range(len(found)))
    assert shared.ratio == pytest.approx(100 / 90, rel=1e-6), (
        "half of the update is saved, and as much travels"
    )
    assert "update 20 to 10" in shared.rule
    ratios = [one.ratio for one in found]
    assert ratios == sorted(ratios, reverse=True)
    assert all(ratio > 1 for ratio in ratios)
    assert "dp2-zero3" not in names, "it gathers for every pass"
    assert rejected["layout:dp2-zero3"].startswith("expected 0.")
    assert "dp2" not in names, "that is what there is"


def test_only_legal_layouts_are_proposed_and_the_broken_rule_is_said() -> None:
    def legal(leaves: Mapping[str, Any]) -> str | None:
        return "no pipelines today" if "parallelism.pipeline_model_parallel_size" in leaves else None

    found, rejected = proposals(account_of(BUSY_WIRE), legal=legal)
    assert not [one for one in found if one.shape.pp > 1]
    assert rejected["layout:pp2"] == "no pipelines today"


def test_with_dropout_only_what_is_shared_may_change() -> None:
    dropping = changed(BASE, Change({"model.hidden_dropout": 0.1}))
    found, rejected = proposals(account_of(BUSY_WIRE), dropping)
    assert {one.shape.dp for one in found} == {2}
    assert "dropout masks" in rejected["layout:tp2"]


def test_without_an_account_the_least_traffic_comes_first() -> None:
    found, _ = proposals(None)
    assert [one.ratio for one in found] == [None] * len(found)
    assert "tells no speed" in found[0].rule
    assert found[0].name == "pp2"


def test_an_account_without_communication_tells_no_speed_of_it() -> None:
    alone = account_of({"compute.matmul": 10})
    assert expected_step(alone, BASE, Shape(1, 1, 1, 0), Shape(2, 1, 1, 0)) is None
    assert expected_step(alone, BASE, Shape(1, 1, 2, 0), Shape(1, 1, 1, 0)) is not None, (
        "nothing travels then"
    )


def test_for_memory_the_least_state_comes_first() -> None:
    found, _ = proposals(None, for_memory=True)
    assert found[0].name in ("dp2-zero3", "pp2", "tp2")
    assert state_bytes(BASE, found[0].shape) == pytest.approx(
        state_bytes(BASE, Shape(1, 1, 2, 0)) / 2, rel=1e-6
    )
    assert found[0].ratio == pytest.approx(2)
    assert [one.name for one in found][-1] == "dp2-zero1"


def test_fewer_processes_are_proposed_where_cost_is_the_goal() -> None:
    found, _ = proposals(account_of({**BUSY_WIRE, "communication.dp.transfer": 200_000_000}), fewer=True)
    best = found[0]
    assert (best.name, best.shape.processes) == ("one", 1)
    assert best.leaves["parallelism.data_parallel_size"] == 1
    assert best.ratio == pytest.approx(2 * 280 / 140), "twice the work, nothing travels, half of the price"
    assert "times 2 / 1 processes" in best.rule
    assert "compute" in best.treats


def test_a_configuration_says_of_how_many_processes_it_is_where_its_sizes_do() -> None:
    assert processes_of(BASE, 4) == 4
    two = changed(
        BASE, Change({"parallelism.data_parallel_size": 2, "parallelism.pipeline_model_parallel_size": 2})
    )
    assert processes_of(two, 8) == 4
    assert shape_of(two, 4) == Shape(1, 2, 2, 0)


def test_a_layout_is_one_change_that_may_round_otherwise() -> None:
    leaves = {"parallelism.tensor_model_parallel_size": 2, "parallelism.zero_stage": 0}
    assert tier_of_change(leaves)[0] == "round-off"
    assert tier_of_change({"parallelism.zero_stage": 1})[0] == "round-off"


# -- by the ladder --------------------------------------------------------------------------------------------------


@pytest.fixture
def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Climb:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    return Climb(tmp_path)


def seconds(config: RunConfig) -> dict[str, float]:
    """Updates are shared by ZeRO; fewer processes have more to compute and less to send."""
    parallelism = config.parallelism
    shared = parallelism.data_parallel_size or 2
    return {
        "compute.matmul": 0.040 * 2 / shared / parallelism.tensor_model_parallel_size,
        "compute.optimizer": 0.020 / (2 if parallelism.zero_stage else 1),
        "communication.dp.transfer": 0.040 if shared > 1 else 0.0,
    }


def tuned(climb: Climb, runner: GoalRunner, gate: FakeGate | None = None, **settings: Any) -> Tune:
    path = climb.start((), **{"world_size": 2, "only": ("layout",), **settings})
    return climb_tune(path, runner=runner, gate=gate or FakeGate(), say=climb.said.append)


def test_the_ladder_tries_layouts_as_moves_and_holds_them_to_round_off(climb: Climb) -> None:
    gate = FakeGate()
    document = tuned(climb, GoalRunner(seconds), gate).document
    first = document["steps"][0]
    assert (first["move"], first["entry"]) == ("layout", None)
    assert {step["move"] for step in document["steps"]} == {"layout"}
    kept = [step for step in document["steps"] if step["kept"]]
    assert kept, [step["why"] for step in document["steps"]]
    assert {tier for _, _, tier in gate.held} == {"round-off"}
    assert all(step["predicted"]["ratio"] > 1 for step in document["steps"])
    assert any(one.startswith("layout:dp2-zero3 was not tried: expected") for one in document["findings"])


def test_one_process_has_no_layouts(climb: Climb) -> None:
    assert tuned(climb, GoalRunner(seconds), world_size=1).document["steps"] == []


def test_fewer_processes_can_be_cheaper_and_each_run_has_its_own_number(climb: Climb) -> None:
    runner = GoalRunner(seconds)
    document = tuned(climb, runner, goal=Goal("cost", price_per_device_hour=3.6)).document
    final = load_config(str(climb.folder / "tunes" / document["tune"] / "configs" / "final.toml")).config
    assert processes_of(final, 2) == 1
    sizes = dict(runner.sizes)
    assert sizes["baseline"] == 2
    assert sizes["trial-1-a"] == 2
    assert sizes["trial-1-b"] == 1
    tokens = 8 * 32
    before, after = 2 * 0.1 / tokens * 1e6 / 1000, 1 * 0.1 / tokens * 1e6 / 1000
    assert document["goal"]["baseline"] == pytest.approx(before)
    assert document["goal"]["final"] == pytest.approx(after)
    assert document["goal"]["ratio"] == pytest.approx(2)
