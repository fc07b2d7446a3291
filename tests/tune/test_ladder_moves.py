"""Under a memory limit the ladder offers a larger batch, and recomputation for one: each is one change, and gated."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_runs import Climb, FakeGate, FakeRunner

from drivetrain.archive.tunes import Tune
from drivetrain.archive.writer import RunWriter
from drivetrain.catalogue import StepEstimate
from drivetrain.config import RunConfig, load_config
from drivetrain.errors import RunError
from drivetrain.tune.gate_change import tier_of_change
from drivetrain.tune.ladder_moves import counted_bytes
from drivetrain.tune.moves import batch_move, changed, recompute_and_batch
from drivetrain.tune.session import climb_tune, contract

LIMIT = 1_000
RECOMPUTED = "2 x all"


def needs(config: RunConfig) -> StepEstimate | str:
    """100 bytes of state and 150 a sequence, of which a budget gives back what does not fit, down to 80."""
    size = config.training.micro_batch_size
    peak = 100 + 150 * size
    if config.memory.recompute_granularity != "budget" or peak <= LIMIT:
        return StepEstimate(peak, 0, "")
    if 100 + 80 * size > LIMIT:
        return f"whatever is recomputed, {100 + 80 * size} bytes are alive at once"
    return StepEstimate(LIMIT, 1_000, RECOMPUTED)


def seconds(config: RunConfig) -> dict[str, float]:
    """Each sequence costs 10 ms, each micro-batch 40 ms, an update 40 ms; recomputing a tenth of it all."""
    size, batch = config.training.micro_batch_size, config.training.global_batch_size
    again = 0.1 if config.memory.recompute_granularity != "none" else 0.0
    products = 0.010 * batch
    found = {
        "compute.matmul": products,
        "compute.optimizer": 0.040,
        "host.launch": 0.040 * batch / size,
    }
    return {**found, "recompute": again * products} if again else found


@pytest.fixture
def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Climb:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    return Climb(tmp_path)


def tuned(
    climb: Climb,
    *overrides: str,
    model: Any = seconds,
    gate: FakeGate | None = None,
    estimate: Any = needs,
    **settings: Any,
) -> Tune:
    given = (f"memory.device_memory_limit_bytes={LIMIT}", "training.global_batch_size=32", *overrides)
    path = climb.start(given, only=("recompute",), **settings)
    return climb_tune(
        path, runner=FakeRunner(model), gate=gate or FakeGate(), estimate=estimate, say=climb.said.append
    )


def test_a_larger_batch_comes_before_recomputation_for_one(climb: Climb) -> None:
    gate = FakeGate()
    document = tuned(climb, "training.micro_batch_size=2", gate=gate).document
    first, second = document["steps"]
    assert (first["move"], first["change"]) == ("larger_batch", {"training.micro_batch_size": 4})
    assert second["move"] == "recompute_larger_batch"
    assert second["change"] == {
        "memory.recompute_granularity": "budget",
        "training.micro_batch_size": 8,
    }
    assert first["kept"]
    assert second["kept"], second["why"]
    assert {one[2] for one in gate.held} == {"statistical"}, "recompute alone would be exact"
    assert first["measured"]["ratio"] == pytest.approx((0.36 + 0.64) / (0.36 + 0.32))
    assert first["predicted"]["ratio"] == pytest.approx((0.36 + 0.64) / (0.36 + 0.32))
    assert second["memory"] == {
        "limit_bytes": LIMIT,
        "predicted_bytes": {"parent": 700, "candidate": LIMIT},
        "counted_bytes": {"parent": None, "candidate": None},
        "recomputed": RECOMPUTED,
    }
    told = "live bytes at the peak 700 to 1,000 predicted, of 1,000; recomputed: 2 x all"
    assert told in second["why"]
    assert {"move", "memory"} <= contract(document)["steps"][0].keys()


def test_the_global_batch_grows_where_that_was_asked_for_and_tokens_are_compared(climb: Climb) -> None:
    whole = ("training.micro_batch_size=4", "training.global_batch_size=4", "training.train_iters=800")
    tune = tuned(climb, *whole, batch_rule="sqrt")
    document = tune.document
    (step,) = [one for one in document["steps"] if one["kept"]]
    assert step["change"]["training.global_batch_size"] == 8
    assert step["change"]["training.train_iters"] == 400
    before = load_config(str(tune.path / "configs" / "000.toml")).config.optimizer.lr
    assert step["change"]["optimizer.lr"] == pytest.approx(2**0.5 * before)
    assert step["measured"]["ratio"] == pytest.approx(2 * 0.12 / (0.08 * 1.1 + 0.08))
    saved = document["saved"]
    assert saved["seconds_per_step"] == pytest.approx(0.12 - (0.08 * 1.1 + 0.08) / 2)
    assert saved["account_seconds_per_step"] == pytest.approx(saved["seconds_per_step"], rel=1e-6)
    assert saved["agreement"] == "agree"
    assert "as many tokens" in saved["rule"]
    final = load_config(str(tune.path / "configs" / "final.toml")).config
    assert final.memory.recompute_granularity == "budget"
    assert "what that frees is filled" in (tune.path / "configs" / "final.toml").read_text()


def test_recomputation_that_costs_more_than_the_batch_brings_is_measured_and_not_kept(climb: Climb) -> None:
    def dear(config: RunConfig) -> dict[str, float]:
        found = seconds(config)
        return {
            **found,
            **({"recompute": 5 * found["recompute"]} if "recompute" in found else {}),
            "host.launch": 0.001,
        }

    document = tuned(climb, "training.micro_batch_size=4", model=dear).document
    (step,) = document["steps"]
    assert (step["move"], step["kept"], step["gate"]) == ("recompute_larger_batch", False, None)
    assert step["measured"]["ratio"] < 1
    said = [one for one in document["findings"] if one.startswith("recompute:larger_batch was not tried")]
    assert said == [
        "recompute:larger_batch was not tried: training.micro_batch_size=8 needs 1,300 bytes, and "
        "memory.device_memory_limit_bytes = 1,000"
    ]


def test_a_batch_that_fits_no_budget_is_said_and_not_run(climb: Climb) -> None:
    document = tuned(climb, "training.micro_batch_size=8").document
    assert document["steps"] == []
    assert any("whatever is recomputed, 1380 bytes are alive at once" in one for one in document["findings"])


def test_without_anybody_who_can_tell_what_fits_no_move_is_tried(climb: Climb) -> None:
    document = tuned(climb, "training.micro_batch_size=4", estimate=None).document
    assert document["steps"] == []
    assert any("nothing here tells what a step of it needs" in one for one in document["findings"])


def test_a_larger_step_must_fit_the_budget_with_the_time_that_it_takes(climb: Climb) -> None:
    whole = ("training.micro_batch_size=4", "training.global_batch_size=4", "training.train_iters=800")
    # Blocks of steps as long as the parent's would fit, and those of twice the batch do not.
    document = tuned(climb, *whole, batch_rule="sqrt", trial_steps=100, budget_s=245.0).document
    assert document["steps"] == []
    (said,) = [one for one in document["findings"] if one.startswith("the budget left no room to try")]
    assert "training.global_batch_size=8" in said
    assert (
        len(tuned(climb, *whole, batch_rule="sqrt", trial_steps=100, budget_s=290.0).document["steps"]) == 1
    )


def test_what_a_step_needs_is_tried_once_and_a_resumed_ladder_asks_again_for_nothing(climb: Climb) -> None:
    asked: list[RunConfig] = []

    def counted(config: RunConfig) -> StepEstimate | str:
        asked.append(config)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return needs(config)

    path = climb.start(
        (
            f"memory.device_memory_limit_bytes={LIMIT}",
            "training.global_batch_size=32",
            "training.micro_batch_size=2",
        ),
        only=("recompute",),
    )
    with pytest.raises(KeyboardInterrupt):
        climb_tune(path, runner=FakeRunner(seconds), gate=FakeGate(), estimate=counted)
    document = climb_tune(path, runner=FakeRunner(seconds), gate=FakeGate(), estimate=counted).document
    assert document["status"] == "finished"
    finished = [one for place, one in enumerate(asked) if place != 3]
    assert len({one.model_dump_json() for one in finished}) == len(finished)


def test_the_count_of_a_run_under_a_limit_is_the_evidence_of_its_memory(tmp_path: Path) -> None:
    manifest: dict[str, Any] = {
        "config_hash": "0",
        "layout": {},
        "provenance": {},
        "devices": {},
        "dataset": {},
        "seed": 1,
    }
    with RunWriter.create(tmp_path, "b", config_toml="", manifest=manifest) as writer:
        writer.open_segment(1)
        writer.event("window", what="memory_count", peak_bytes=640)
        run = str(writer.path)
    blocks = [
        {"side": "A", "run": None, "outcome": "crash"},
        {"side": "B", "run": run, "outcome": "finished"},
    ]
    assert counted_bytes(blocks) == {"parent": None, "candidate": 640}
    shutil.rmtree(run)
    assert counted_bytes(blocks) == {"parent": None, "candidate": None}, "a resumed ladder goes on without"


# -- the gate between two configurations ----------------------------------------------------------------------------


def base(*overrides: str) -> RunConfig:
    return load_config("llama-2m", ["training.micro_batch_size=4", *overrides]).config


@pytest.mark.parametrize("rule", ["none", "sqrt", "linear"])
def test_recompute_with_a_larger_batch_is_judged_as_one_statistical_change(rule: Any) -> None:
    before = base()
    change = recompute_and_batch(before, {"recompute_granularity": "full"}, 8, factor=2, rule=rule)
    tier, why = tier_of_change(change.leaves, (before, changed(before, change)))
    assert tier == "statistical"
    assert "recompute_larger_batch" in why
    assert "global batch 16 to 32" in why


def test_a_batch_with_its_learning_rate_is_judged_as_one_change_too() -> None:
    before = base()
    change = batch_move(before, 2, "sqrt")
    assert tier_of_change(change.leaves, (before, changed(before, change)))[0] == "statistical"


def test_leaves_that_do_not_belong_to_the_batch_stay_a_bundle() -> None:
    before = base()
    change = recompute_and_batch(before, {"recompute_granularity": "full"}, 8, factor=2, rule="sqrt")
    for slip in ({"optimizer.lr": 1e-4}, {"optimizer.weight_decay": 0.3}):
        leaves = {**change.leaves, **slip}
        other = changed(before, type(change)(leaves))
        with pytest.raises(RunError, match="do not belong together"):
            tier_of_change(leaves, (before, other))
