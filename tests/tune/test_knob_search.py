"""The ladder searches knobs: legal values alone, within memory and budget, and gates nothing that is not better."""

import os
from pathlib import Path
from typing import Any

import pytest
from fake_runs import Climb, FakeGate, FakeRunner

from drivetrain.archive.tunes import Tune, open_tune
from drivetrain.catalogue import StepEstimate
from drivetrain.config import RunConfig, load_config
from drivetrain.errors import DrivetrainError
from drivetrain.tune.session import climb_tune
from drivetrain.tune.trainer import Outcome

MICRO, LAYERS = "training.micro_batch_size", "memory.recompute_num_layers"
LIMIT = "memory.device_memory_limit_bytes=1000"
WHOLE = ("memory.recompute_granularity=full", "memory.recompute_method=block", "model.num_layers=8")


def seconds(config: RunConfig) -> dict[str, float]:
    """Each micro-batch costs 10 ms, each row of a product more the more rows there are; recomputed layers cost 5 ms."""
    size, batch = config.training.micro_batch_size, config.training.global_batch_size
    layers = config.memory.recompute_num_layers or 1
    again = 0.005 * layers if config.memory.recompute_granularity == "full" else 0.0
    found = {"compute.matmul": 0.1 + 0.002 * size, "host.launch": 0.010 * batch / size}
    return {**found, **({"recompute": again} if again else {})}


def needs(config: RunConfig) -> StepEstimate | str:
    """100 bytes a sequence, ten less of each for a recomputed layer."""
    layers = config.memory.recompute_num_layers or 0 if config.memory.recompute_granularity == "full" else 0
    return StepEstimate(100 + config.training.micro_batch_size * (100 - 10 * layers), 0, "")


@pytest.fixture
def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Climb:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    return Climb(tmp_path)


def tuned(
    climb: Climb,
    *overrides: str,
    runner: FakeRunner | None = None,
    gate: FakeGate | None = None,
    estimate: Any = needs,
    **settings: Any,
) -> Tune:
    path = climb.start(overrides, **{"only": ("micro_batch",), "knob_trials": 4, **settings})
    return climb_tune(
        path,
        runner=runner or FakeRunner(seconds),
        gate=gate or FakeGate(),
        estimate=estimate,
        say=climb.said.append,
    )


def tried(tune: Tune, leaf: str = MICRO) -> list[Any]:
    return [step["change"][leaf] for step in tune.document["steps"]]


def kept_values(tune: Tune) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for step in tune.document["steps"]:
        if step["kept"]:
            found.update(step["change"])
    return found


def test_the_micro_batch_is_searched_at_a_fixed_global_batch_under_the_round_off_gate(climb: Climb) -> None:
    gate = FakeGate()
    tune = tuned(climb, "training.global_batch_size=32", gate=gate)
    assert set(tried(tune)) <= {1, 2, 8, 16, 32}, "what divides the batch, but for the size there was"
    assert kept_values(tune) == {MICRO: 16} or kept_values(tune) == {MICRO: 8}
    assert {tier for _, _, tier in gate.held} == {"round-off"}
    final = load_config(str(tune.path / "configs" / "final.toml")).config
    assert final.training.global_batch_size == 32
    assert open_tune(tune.path).document["final_gate"]["verdict"] == "pass"


def test_sizes_that_need_more_than_the_memory_limit_are_not_run_and_that_is_said(climb: Climb) -> None:
    tune = tuned(climb, "training.global_batch_size=32", LIMIT)
    assert tried(tune)
    assert max(tried(tune)) <= 8
    (said,) = [one for one in tune.document["findings"] if "values that were not tried" in one]
    assert f"{MICRO}=16: it needs 1,700 bytes, and memory.device_memory_limit_bytes = 1,000" in said


def test_nothing_that_is_not_better_is_gated(climb: Climb) -> None:
    def same(_config: RunConfig) -> dict[str, float]:
        return {"compute.matmul": 0.1}

    gate = FakeGate()
    tune = tuned(climb, "training.global_batch_size=32", runner=FakeRunner(same), gate=gate)
    assert tune.document["steps"]
    assert gate.held == []
    assert not any(step["kept"] for step in tune.document["steps"])
    assert len(tune.document["steps"]) < 4, "a flat top ends the search"


def test_a_value_that_fails_is_worse_than_those_that_run(climb: Climb) -> None:
    def fails(config: RunConfig) -> tuple[Outcome, str] | None:
        return ("out_of_memory", "no room") if config.training.micro_batch_size > 8 else None

    tune = tuned(climb, "training.global_batch_size=32", runner=FakeRunner(seconds, failures=fails))
    assert kept_values(tune) == {MICRO: 8}


def test_a_knob_of_what_is_not_in_effect_is_not_searched(climb: Climb) -> None:
    tune = tuned(climb, "memory.recompute_granularity=selective", only=("recompute",))
    assert tune.document["steps"] == []


def test_fewer_recomputed_layers_are_found_as_far_as_memory_lets(climb: Climb) -> None:
    """From eight layers down: each costs 5 ms, and six are the fewest that fit."""
    tune = tuned(
        climb,
        *WHOLE,
        f"{LAYERS}=8",
        "memory.device_memory_limit_bytes=260",
        "training.global_batch_size=4",
        "training.train_iters=800",
        only=("recompute",),
        knob_trials=6,
    )
    assert kept_values(tune) == {LAYERS: 6}
    assert tune.document["steps"][0]["treats"] == ["recompute"]


# -- two that interact ----------------------------------------------------------------------------------------------

BOTH: dict[str, Any] = {"only": ("micro_batch", "recompute"), "knob_trials": 2}


def interacting(climb: Climb, **more: Any) -> Tune:
    return tuned(
        climb,
        *WHOLE,
        f"{LAYERS}=4",
        "training.global_batch_size=32",
        "training.micro_batch_size=2",
        "memory.device_memory_limit_bytes=600",
        **{**BOTH, **more},
    )


def test_knobs_that_interact_are_searched_as_one_change_of_both(climb: Climb) -> None:
    pytest.importorskip("optuna")
    tune = interacting(climb)
    # Under a limit a larger batch is a move of its own.
    steps = [step for step in tune.document["steps"] if step["move"] is None]
    assert any(set(step["change"]) == {MICRO, LAYERS} for step in steps), "both at once"
    assert len(steps) <= 4
    assert {step["gate"]["tier"] for step in steps if step["gate"]} <= {"round-off"}
    assert any("search of training.micro_batch_size from 2 and memory.recompute" in one for one in climb.said)
    keys = [entry["piece"] for entry in tune.document["pieces"]]
    assert "optuna" in keys


def test_without_optuna_they_are_searched_one_after_the_other_and_that_is_recorded(
    climb: Climb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.tune.ladder.optuna_version", lambda: None)
    tune = interacting(climb)
    assert all(len(step["change"]) == 1 for step in tune.document["steps"])
    (said,) = [one for one in tune.document["findings"] if "one after the other" in one]
    assert "pip install 'drivetrain[tune]'" in said


def test_a_resumed_ladder_searches_as_it_would_have_whatever_was_installed_since(
    climb: Climb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.tune.ladder.optuna_version", lambda: None)
    whole = interacting(climb).document
    runner = FakeRunner(seconds)
    path = climb.start(
        (
            *WHOLE,
            f"{LAYERS}=4",
            "training.global_batch_size=32",
            "training.micro_batch_size=2",
            "memory.device_memory_limit_bytes=600",
        ),
        **BOTH,
    )

    def interrupt() -> None:
        if len(runner.started) == 9:
            runner.before = lambda: None
            raise KeyboardInterrupt

    runner.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        climb_tune(path, runner=runner, gate=FakeGate(), estimate=needs)
    monkeypatch.setattr("drivetrain.tune.ladder.optuna_version", lambda: "99.0")
    # Nothing was there when it was begun, and one after the other it stays.
    done = climb_tune(path, runner=runner, gate=FakeGate(), estimate=needs).document
    assert [step["change"] for step in done["steps"]] == [step["change"] for step in whole["steps"]]


def test_another_optuna_does_not_go_on_with_a_search(climb: Climb, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    runner = FakeRunner(seconds)
    path = climb.start(
        (*WHOLE, f"{LAYERS}=4", "training.global_batch_size=32", "training.micro_batch_size=2"), **BOTH
    )

    def interrupt() -> None:
        if len(runner.started) == 9:
            runner.before = lambda: None
            raise KeyboardInterrupt

    runner.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        climb_tune(path, runner=runner, gate=FakeGate(), estimate=needs)
    monkeypatch.setattr("drivetrain.tune.ladder.optuna_version", lambda: "0.1")
    with pytest.raises(DrivetrainError, match=r"begun with optuna .* and 0\.1 is installed"):
        climb_tune(path, runner=runner, gate=FakeGate(), estimate=needs)


def test_two_interacting_knobs_killed_and_resumed_end_the_same(climb: Climb) -> None:
    pytest.importorskip("optuna")
    whole = interacting(climb).document
    runner = FakeRunner(seconds)
    overrides = (
        *WHOLE,
        f"{LAYERS}=4",
        "training.global_batch_size=32",
        "training.micro_batch_size=2",
        "memory.device_memory_limit_bytes=600",
    )
    path = climb.start(overrides, **BOTH)
    kills = iter((3, 14))

    def kill_at(number: int | None) -> None:
        def maybe() -> None:
            if number is not None and len(runner.started) >= number:
                raise KeyboardInterrupt

        runner.before = maybe

    document: dict[str, Any] = {}
    while document.get("status") != "finished":
        kill_at(next(kills, None))
        try:
            document = climb_tune(path, runner=runner, gate=FakeGate(), estimate=needs).document
        except KeyboardInterrupt:
            continue
    for key in ("change", "kept", "measured"):
        assert [step[key] for step in document["steps"]] == [step[key] for step in whole["steps"]]
