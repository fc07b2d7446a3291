"""Before it tries anything the ladder says what it expects to try within its budget, with the least budget of each."""

import os
from pathlib import Path
from typing import Any

import pytest
from fake_runs import DAY, Climb, FakeGate, FakeRunner

from drivetrain.archive.tunes import Tune
from drivetrain.tune.budget_plan import plan_lines
from drivetrain.tune.session import climb_tune, contract


@pytest.fixture
def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Climb:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    return Climb(tmp_path)


def planned(climb: Climb, runner: FakeRunner | None = None, **settings: Any) -> Tune:
    path = climb.start(**settings)
    return climb_tune(
        path, runner=runner or FakeRunner(), gate=FakeGate(), say=climb.said.append, only_plan=True
    )


def test_a_plan_runs_the_baseline_alone_and_the_tune_can_go_on(climb: Climb) -> None:
    runner = FakeRunner()
    tune = planned(climb, runner)
    assert runner.started == [("profile", "baseline")]
    assert tune.status() == "interrupted"
    assert "only planned" in tune.document["reason"]
    rows = contract(tune.document)["plan"]["candidates"]
    assert rows[0]["candidate"] == "data_workers", "it treats the largest class"
    assert tune.document["steps"] == []
    done = climb_tune(tune.path, runner=runner, gate=FakeGate())
    assert done.document["status"] == "finished"
    assert [one for one in runner.started if one == ("profile", "baseline")] == [("profile", "baseline")]
    assert done.document["steps"][0]["entry"] == rows[0]["candidate"]


def test_the_first_candidates_least_budget_is_what_a_ladder_asks_for(climb: Climb) -> None:
    rows = planned(climb).document["plan"]["candidates"]
    least = min(row["least_budget_s"] for row in rows)
    enough = climb(budget_s=least + 1.0).document
    assert enough["steps"], "with it something is tried"
    document = planned(climb, budget_s=least / 2).document
    assert {row["fits"] for row in document["plan"]["candidates"]} == {"no"}


def test_what_a_budget_reaches_follows_the_order(climb: Climb) -> None:
    whole = planned(
        climb, knob_trials=2, only=("data_workers", "bf16", "fused_adamw", "micro_batch")
    ).document["plan"]
    assert {row["fits"] for row in whole["candidates"]} == {"yes"}
    assert whole["budget_s"] == DAY
    ends = sum(row["trial_s"] + row["gate_s"] + row["profile_s"] for row in whole["candidates"][:2])
    some = planned(
        climb,
        budget_s=whole["spent_s"] + ends,
        knob_trials=2,
        only=("data_workers", "bf16", "fused_adamw", "micro_batch"),
    ).document["plan"]
    fits = [row["fits"] for row in some["candidates"]]
    assert fits[0] == "yes"
    assert fits[-1] != "yes"
    search = next(row for row in whole["candidates"] if row["candidate"].startswith("micro_batch:"))
    assert search["trials"] == 2
    assert search["tier"] == "round-off"


def test_the_plan_is_said_before_anything_is_tried_and_reads_by_itself(climb: Climb) -> None:
    tune = climb(only=("data_workers",))
    first_trial = next(
        place for place, line in enumerate(climb.said) if line.startswith("data.num_workers=1")
    )
    plan = next(place for place, line in enumerate(climb.said) if line.startswith("plan: 1 candidates"))
    assert plan < first_trial
    lines = plan_lines(tune.document["plan"])
    assert "data.num_workers=1 (data_workers; exact; for data.loader)" in lines[1]
    assert "least budget" in lines[1]
    assert lines[1].endswith("fits")


def test_nothing_to_try_is_said(climb: Climb) -> None:
    document = planned(climb, only=("async_save",)).document
    assert plan_lines(document["plan"]) == [
        "nothing of the catalogue treats what the baseline's account holds"
    ]
