"""The benchmark of planted faults: which scenarios it runs, and what it makes of what it found."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import diagnosis
from diagnosis import Job, Judgement, Place, Result, Scenario, all_scenarios, chosen, claims_of, line_of

FOUND = Judgement(
    scenario="data.padding",
    found=("data.padding", "host.python"),
    cost_ms=42.0,
    true_ms=40.0,
    low_ms=38.0,
    high_ms=42.0,
    faulty_ms=100.0,
    clean_ms=60.0,
    names_right=True,
    cost_right=True,
)


def scenario_of(name: str) -> Scenario:
    return next(one for one in all_scenarios() if one.name == name)


def result(judgement: Judgement | None = FOUND, name: str = "data.padding", **more: object) -> Result:
    named = None if judgement is None else replace(judgement, scenario=name)
    return Result(scenario_of(name), named, clean_runs=3, **more)  # type: ignore[arg-type]


def test_a_name_that_is_none_is_answered_with_the_nearest() -> None:
    every = all_scenarios()
    assert [one.name for one in chosen(["data.padding"], every)] == ["data.padding"]
    assert chosen([], every) == list(every)
    with pytest.raises(SystemExit, match=r"no such scenario; the nearest is 'data\.padding'"):
        chosen(["data.paddin"], every)
    assert {one.name for one in chosen(diagnosis.QUICK, every)} == set(diagnosis.QUICK)


def test_names_and_costs_are_claims_over_the_scenarios_that_cost_enough() -> None:
    wrong = replace(FOUND, names_right=False, cost_right=False, cost_ms=10.0)
    unknown = replace(FOUND, cost_ms=None, cost_right=None)
    small = replace(FOUND, true_ms=5.0, names_right=False)
    named, priced, quiet, *single = claims_of(
        [
            result(),
            result(wrong, "host.python"),
            result(unknown, "kernels.graph_break"),
            result(small, "data.cold_cache"),
            result(None, "shapes.dynamic", why_not="no root"),
        ]
    )
    assert named.ratio == pytest.approx(2 / 3 / diagnosis.NAMED)
    assert "not named: host.python" in named.note
    assert "cost less: data.cold_cache 5%" in named.note
    assert "not run: shapes.dynamic: no root" in named.note
    assert priced.ratio == pytest.approx(1 / 2 / diagnosis.NAMED)
    assert "unknown: kernels.graph_break" in priced.note
    assert quiet.ratio == 1.0
    assert [one.target for one in single] == [0.0] * 4, "for information"
    assert single[0].ratio == pytest.approx(42 / 40)


def test_clean_runs_that_claim_a_fault_are_counted_and_named() -> None:
    claimed = ["host.logging: 3.0%", "host.thread_oversubscription: cost unknown"]
    quiet = claims_of([result(), result(unfounded=claimed, loud_runs=1, name="host.python")])[2]
    assert quiet.ratio == pytest.approx(5 / 6), "two findings of one run"
    assert "host.python: host.logging: 3.0%" in quiet.note


def test_a_job_that_hangs_is_its_own_scenarios_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hangs(job: Job) -> Path:
        raise subprocess.TimeoutExpired(["train"], 300)

    monkeypatch.setattr(diagnosis, "run", hangs)
    scenario = replace(scenario_of("data.padding"), faulty=_job, clean=_job)
    found = diagnosis.measured(scenario, Place(tmp_path), diagnosis.Pace(1, 1, 0.0))
    assert found.judgement is None
    assert "timed out after 300 seconds" in str(found.why_not)


def _job(place: Place) -> Job:
    return Job(folder=place.folder, config="")


def test_the_list_says_what_was_found_what_is_true_and_what_could_not_run() -> None:
    assert "named, right: found 42.0 ms, true 40.0 ms [38.0, 42.0] of 100.0 ms (40%)" in line_of(result())
    wrong = replace(FOUND, names_right=False, cost_right=None, cost_ms=None)
    assert "NOT NAMED, cost not known: found unknown" in line_of(result(wrong))
    assert "not run: no root" in line_of(result(None, why_not="no root"))
