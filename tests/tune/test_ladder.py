"""The ladder over a runner whose runs follow from a cost model: what is kept, dropped, refused, and said."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from fake_runs import Climb, FakeGate, FakeRunner, classes_of

from drivetrain.archive.tunes import Tune
from drivetrain.cli.tune_command import Options, run_replay
from drivetrain.config import BASIC_RULES, LaunchFacts, Rule, RunConfig, load_config
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.tune.session import climb_tune, contract
from drivetrain.tune.trainer import Attempt


@pytest.fixture
def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Climb:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # Nobody pulls the plug here.
    return Climb(tmp_path)


def steps(tune: Tune) -> dict[str, dict[str, Any]]:
    return {step["entry"]: step for step in tune.document["steps"]}


def test_the_largest_class_is_treated_first_and_what_is_faster_is_kept(climb: Climb) -> None:
    tune = climb()
    document = tune.document
    assert document["status"] == "finished"
    assert document["steps"][0]["entry"] == "data_workers"
    assert all(step["kept"] for step in document["steps"]), document["steps"]
    assert {step["entry"] for step in document["steps"]} == {"data_workers", "bf16", "fused_adamw", "compile"}
    first = document["steps"][0]
    assert first["change"] == {"data.num_workers": 1}
    assert first["measured"]["ratio"] == pytest.approx(0.100 / 0.080)
    assert first["predicted"] is None
    assert "as many builders as before" in first["no_prediction"], "the thread that builds is one already"
    assert first["gate"] == {"tier": "exact", "verdict": "pass", "why": "said to be pass"}
    assert first["device_seconds"] > 0


def test_after_a_kept_change_the_new_account_decides(climb: Climb) -> None:
    document = climb().document
    for step, following in zip(document["steps"], document["steps"][1:], strict=False):
        assert following["classes_before"] == step["classes_after"]
        largest = max(following["classes_before"], key=following["classes_before"].get)
        assert largest in following["treats"] or not _treatable(document, following, largest)


def _treatable(document: dict[str, Any], step: dict[str, Any], name: str) -> bool:
    """Whether a later step treats ``name``, so that its entry could have had its turn already."""
    later = document["steps"][step["index"] :]
    return any(name in one["treats"] for one in later)


def test_the_final_configuration_is_measured_and_gated_against_the_first_baseline(climb: Climb) -> None:
    gate = FakeGate()
    tune = climb(gate=gate)
    document = tune.document
    assert gate.held[-1][0] == "000.toml"
    assert gate.held[-1][2] == "statistical", "bf16 is the strictest of what was kept"
    assert document["final_gate"]["verdict"] == "pass"
    after = sum(classes_of(load_config(str(tune.path / document["final"]["config"])).config).values())
    assert document["speed_up"]["ratio"] == pytest.approx(0.100 / after)
    assert document["final"]["step_s"] == pytest.approx(after)


def test_the_saved_seconds_agree_with_the_account(climb: Climb) -> None:
    saved = climb().document["saved"]
    assert saved["account_seconds_per_step"] == pytest.approx(saved["seconds_per_step"], rel=1e-6)
    assert abs(saved["deviation"]) < 1e-6
    assert sum(saved["classes"].values()) == pytest.approx(saved["account_seconds_per_step"])
    assert saved["device_hours_per_run"] == pytest.approx(saved["seconds_per_step"] * 400 / 3600)


def test_the_final_configuration_loads_and_says_why_each_change_is_there(climb: Climb) -> None:
    tune = climb()
    text = (tune.path / "configs" / "final.toml").read_text()
    config = load_config(str(tune.path / "configs" / "final.toml")).config
    assert config.data.num_workers == 1
    assert config.optimizer.fused
    lines = text.splitlines()
    above = lines[next(place for place, line in enumerate(lines) if line.startswith("num_workers")) - 1]
    assert above.startswith("# was 0: worker processes")
    assert "gate exact: pass" in above
    assert "1.250x [1.250, 1.250]" in above


def test_a_change_whose_gate_does_not_pass_is_discarded(climb: Climb) -> None:
    for answer in ("fail", "suspicious", "inconclusive", "not comparable"):

        def of_bf16(config: RunConfig, answer: str = answer) -> str:
            return answer if config.precision.params_dtype == "bf16" else "pass"

        tune = climb(gate=FakeGate(of_bf16))
        step = steps(tune)["bf16"]
        assert not step["kept"]
        assert step["measured"]["ratio"] > 1.1
        assert step["gate"]["verdict"] == answer
        assert answer in step["why"]
        assert load_config(str(tune.path / "configs" / "final.toml")).config.precision.params_dtype == "fp32"


@pytest.mark.parametrize("outcome", ["out_of_memory", "crash", "hang", "diverged", "refused"])
def test_a_candidate_that_fails_is_a_result(climb: Climb, outcome: Any) -> None:
    runner = FakeRunner(failures=lambda config: (outcome, "so it was") if config.fusion.compile else None)
    tune = climb(runner)
    step = steps(tune)["compile"]
    assert (step["outcome"], step["kept"], step["measured"], step["gate"]) == (outcome, False, None, None)
    assert "so it was" in step["why"]
    assert [block["outcome"] for block in step["blocks"]] == ["finished", outcome]
    assert tune.document["status"] == "finished"
    assert tune.document["final"] is not None


def test_a_request_without_effect_is_found_by_its_first_block(climb: Climb) -> None:
    tune = climb(FakeRunner(inactive=lambda config: "no compiler" if config.fusion.compile else None))
    step = steps(tune)["compile"]
    assert not step["kept"]
    assert step["why"] == "without effect: no compiler"
    assert len(step["blocks"]) == 2


def test_a_kept_change_that_its_own_profile_refutes_is_a_finding(climb: Climb) -> None:
    runner = FakeRunner()
    runner.refuted = ("fused_adamw",)
    tune = climb(runner, only=("fused_adamw",))
    assert steps(tune)["fused_adamw"]["kept"]
    said = "optimizer.fused=true was kept, and has no effect in its own profile: nothing of it was seen"
    assert said in tune.document["findings"]


def test_what_the_catalogue_demands_of_an_entry_is_asked_before_it_is_tried(
    climb: Climb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(config: RunConfig, _facts: LaunchFacts) -> str | None:
        return "compile wants one layer" if config.fusion.compile and config.model.num_layers > 1 else None

    rules = (*BASIC_RULES, Rule("one-layer", ("fusion.compile",), check, "compile wants one layer"))
    monkeypatch.setattr("drivetrain.tune.candidates.all_rules", lambda: rules)
    tune = climb()
    assert "compile" not in steps(tune)
    (why,) = [one for one in tune.document["findings"] if one.startswith("compile was not tried")]
    assert "compile wants one layer" in why


def test_a_baseline_that_breaks_a_rule_of_an_entry_is_refused(
    climb: Climb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(config: RunConfig, _facts: LaunchFacts) -> str | None:
        return "compile wants one layer" if config.fusion.compile else None

    rules = (*BASIC_RULES, Rule("one-layer", ("fusion.compile",), check, "compile wants one layer"))
    path = climb.start(overrides=("fusion.compile=true",))
    monkeypatch.setattr("drivetrain.tune.ladder.all_rules", lambda: rules)
    runner = FakeRunner()
    with pytest.raises(ConfigurationError, match="compile wants one layer"):
        climb_tune(path, runner=runner, gate=FakeGate())
    assert runner.started == []


def test_memory_is_that_of_the_candidate_less_that_of_its_parent(climb: Climb) -> None:
    assert steps(climb())["bf16"]["memory_bytes"] == -100_000


def test_candidates_know_their_parents_run(climb: Climb) -> None:
    runner = FakeRunner()
    document = climb(runner).document
    given = [options[1] for options in runner.options if options[:1] == ["--parent"]]
    firsts = {step["blocks"][0]["run"] for step in document["steps"]}
    assert firsts <= set(given)


def test_nothing_found_leaves_no_final_configuration(climb: Climb) -> None:
    tune = climb(FakeRunner(lambda _config: {"compute.matmul": 0.05, "data.loader": 0.05}))
    document = tune.document
    assert (document["final"], document["speed_up"], document["final_gate"]) == (None, None, None)
    assert {step["entry"] for step in document["steps"]} == {"data_workers", "bf16", "fp16"}
    assert not any(step["kept"] for step in document["steps"])
    assert not (tune.path / "configs" / "final.toml").exists()


def test_what_is_not_tried_is_said_with_its_reason(climb: Climb) -> None:
    fed = FakeRunner(lambda config: {**classes_of(config), "data.loader": 0.0003})
    tune = climb(fed, missing=lambda name: "no g++" if name == "compile" else None)
    findings = "\n".join(tune.document["findings"])
    assert "compile was not tried: this machine lacks compile: no g++" in findings
    assert re.search(r"data_workers was not tried: it treats 0\.\d% of the step", findings)
    assert not {"compile", "data_workers"} & steps(tune).keys()


def test_only_the_named_entries_are_tried(climb: Climb) -> None:
    assert set(steps(climb(only=("fused_adamw", "bf16")))) == {"fused_adamw", "bf16"}


# -- the end ------------------------------------------------------------------------------------------------------


def shadowed(config: RunConfig) -> dict[str, float]:
    """Fused AdamW helps until bf16 is there, which makes the very same time vanish."""
    bf16 = config.precision.params_dtype == "bf16"
    gain = 0.02 if config.optimizer.fused and not bf16 else 0.0
    return {"compute.optimizer": 0.06 - gain - (0.03 if bf16 else 0), "compute.matmul": 0.02}


def test_a_change_whose_removal_does_not_slow_the_run_is_dropped_and_said(climb: Climb) -> None:
    tune = climb(FakeRunner(shadowed), only=("fused_adamw", "bf16"))
    document = tune.document
    removed = {step["entry"]: step for step in document["leave_one_out"]}
    assert not removed["fused_adamw"]["kept"]
    assert removed["fused_adamw"]["change"] == {"optimizer.fused": False}
    assert not steps(tune)["fused_adamw"]["kept"]
    assert "dropped at the end" in steps(tune)["fused_adamw"]["why"]
    assert any("optimizer.fused=true was kept and then dropped" in one for one in document["findings"])
    assert not load_config(str(tune.path / "configs" / "final.toml")).config.optimizer.fused
    assert document["final_gate"]["tier"] == "statistical"


def during_first_removal(factor: float) -> FakeRunner:
    """The candidate of the trial in which the first step is removed takes ``factor`` times its step."""

    def model(config: RunConfig) -> dict[str, float]:
        scale = factor if config.run.name == "without-1-b" else 1.0
        return {name: seconds * scale for name, seconds in classes_of(config).items()}

    return FakeRunner(model)


def test_where_everything_kept_is_dropped_together_nothing_is_held_against_the_baseline(climb: Climb) -> None:
    gate = FakeGate()
    tune = climb(during_first_removal(0.1), gate, only=("data_workers",), knob_trials=3)
    document = tune.document
    assert document["status"] == "finished"
    assert sum(step["gate"] is not None for step in document["steps"]) == 2, "the entry and its knob's value"
    assert not any(step["kept"] for step in document["steps"])
    assert (document["final"], document["final_gate"], len(gate.held)) == (None, None, 2)


def test_what_went_with_its_entry_keeps_no_other_from_being_removed_once(climb: Climb) -> None:
    tune = climb(during_first_removal(0.1), only=("data_workers", "fused_adamw", "bf16"), knob_trials=3)
    document = tune.document
    assert sum(step["gate"] is not None for step in document["steps"]) == 4
    removed = {one["entry"]: one["kept"] for one in document["leave_one_out"]}
    assert removed == {"data_workers": False, "fused_adamw": True, "bf16": True}


def test_a_change_without_which_the_run_cannot_be_profiled_stays(climb: Climb) -> None:
    class Failing(FakeRunner):
        def profile(self, config: Path, overrides: Any, **options: Any) -> Attempt:
            if any("profile-without-" in one for one in overrides):
                return Attempt("crash", None, "no room", 1.0, None)
            return super().profile(config, overrides, **options)

    tune = climb(Failing(shadowed), only=("fused_adamw", "bf16"))
    document = tune.document
    removed = {step["entry"]: step for step in document["leave_one_out"]}
    assert removed["fused_adamw"]["kept"]
    assert "no room" in removed["fused_adamw"]["why"]
    assert steps(tune)["fused_adamw"]["kept"]
    assert load_config(str(tune.path / "configs" / "final.toml")).config.optimizer.fused


def test_a_change_without_which_the_run_fails_stays_and_that_is_said(climb: Climb) -> None:
    runner = FakeRunner(
        failures=lambda config: (
            ("out_of_memory", "too large") if (config.run.name or "").startswith("without-1-b") else None
        )
    )
    tune = climb(runner, only=("data_workers", "fused_adamw"))
    first = tune.document["leave_one_out"][0]
    assert first["kept"]
    assert first["why"].startswith("it stays, it could not be run without it; ")
    assert "too large" in first["why"]


def test_an_undecided_removal_leaves_the_change_where_it_is(
    climb: Climb, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = FakeRunner()
    factors = iter([0.6, 1.1] * 8)

    def model(config: RunConfig) -> dict[str, float]:
        removed = (config.run.name or "").startswith("without-1-b")
        scale = 0.9 * next(factors) if removed else 1.0
        return {name: seconds * scale for name, seconds in classes_of(config).items()}

    runner.model = model
    tune = climb(runner, only=("data_workers", "fused_adamw"))
    first = tune.document["leave_one_out"][0]
    assert first["measured"]["low"] < 0.99 < 1 < first["measured"]["ratio"]
    assert first["kept"]
    assert first["why"].startswith("it stays, by its own trial; ")
    assert all(step["kept"] for step in tune.document["steps"])
    shown = Options(None, str(tune.path.parent), (), True, None, False, None, None, None, None)
    assert run_replay(tune.id, (), shown, as_json=False) == 0
    assert "stays" in capsys.readouterr().out.partition("without")[2].splitlines()[2]


def test_what_slows_the_run_when_removed_stays(climb: Climb) -> None:
    document = climb().document
    assert len(document["leave_one_out"]) == 4
    assert all(step["kept"] and step["measured"]["high"] < 1 for step in document["leave_one_out"])


def test_without_leave_one_out_nothing_is_removed(climb: Climb) -> None:
    assert climb(leave_one_out=False).document["leave_one_out"] == []


def test_a_final_configuration_that_fails_its_gate_is_withdrawn(climb: Climb) -> None:
    def of_both(config: RunConfig) -> str:
        return "fail" if config.optimizer.fused and config.data.num_workers else "pass"

    class OnlyAtTheEnd(FakeGate):
        def __call__(self, baseline: Path, candidate: Path, tier: Any, trainer: Any) -> Any:
            verdict = super().__call__(baseline, candidate, tier, trainer)
            steps_passed = baseline.name == "000.toml" and len(self.held) > 2
            return verdict if steps_passed else type(verdict)(tier, "pass", "a step")

    tune = climb(gate=OnlyAtTheEnd(of_both), only=("data_workers", "fused_adamw"))
    document = tune.document
    assert document["final_gate"]["verdict"] == "fail"
    assert (document["final"], document["speed_up"], document["saved"]) == (None, None, None)
    assert any("withdrawn" in finding for finding in document["findings"])
    assert not (tune.path / "configs" / "final.toml").exists()


# -- knobs --------------------------------------------------------------------------------------------------------


def test_a_knob_is_searched_while_its_class_holds_time(climb: Climb) -> None:
    tune = climb(only=("data_workers",), knob_trials=5)
    document = tune.document
    values = [step["change"].get("data.num_workers") for step in document["steps"]]
    assert values[0] == 1
    config = load_config(str(tune.path / "configs" / "final.toml")).config
    assert config.data.num_workers in (3, 4), "the cost model has its least at 4"
    kept = [step["change"] for step in document["steps"] if step["kept"]]
    assert kept[-1]["data.num_workers"] == config.data.num_workers
    searched = [step for step in document["steps"][1:] if "data.num_workers" in step["change"]]
    assert len(searched) <= 2 * 5, "two knobs, together"
    assert len({tuple(step["change"].items()) for step in searched}) == len(searched), (
        "nothing is tried twice"
    )


def test_what_a_search_found_goes_with_the_entry_it_belongs_to(climb: Climb) -> None:
    def no_gain_in_the_end(config: RunConfig) -> dict[str, float]:
        loader = 0.04 / (1 + config.data.num_workers)
        return {"data.loader": 0.0 if config.optimizer.fused else loader, "compute.optimizer": 0.03}

    tune = climb(FakeRunner(no_gain_in_the_end), only=("data_workers", "fused_adamw"), knob_trials=3)
    kept = [step for step in tune.document["steps"] if step["kept"]]
    assert [step["entry"] for step in kept] == ["fused_adamw"]
    assert load_config(str(tune.path / "configs" / "final.toml")).config.data.num_workers == 0


def test_what_a_search_found_is_measured_afresh_in_the_end(climb: Climb) -> None:
    runner = FakeRunner()
    tune = climb(runner, overrides=("data.num_workers=1",), only=("data_workers",), knob_trials=3)
    (kept,) = [step for step in tune.document["steps"] if step["kept"]]
    assert ("profile", "final-trial-b") in runner.started
    assert tune.document["final_trial"]["blocks"] != kept["blocks"]


def test_the_end_of_a_search_that_comes_first_fits_the_budget(climb: Climb) -> None:
    settings: dict[str, Any] = {"overrides": ("data.num_workers=1",), "only": ("data_workers",)}
    spent = []
    for budget_s in range(60, 140, 10):
        try:
            document = climb(budget_s=float(budget_s), knob_trials=1, **settings).document
        except DrivetrainError:
            continue
        spent.append(document["spent_s"])
        assert document["spent_s"] <= budget_s
        assert document["final_gate"] is not None
    assert len(spent) > 1, "some budgets hold a search, its gate and the end"


def test_a_leaf_changed_twice_says_what_it_was_each_time(climb: Climb) -> None:
    tune = climb(only=("data_workers",), knob_trials=3)
    lines = (tune.path / "configs" / "final.toml").read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("num_workers"))
    assert lines[place - 2].startswith("# was 0: ")
    assert lines[place - 1].startswith("# was 1: ")


# -- bad input and budgets ----------------------------------------------------------------------------------------


def test_a_diverging_baseline_is_said(climb: Climb) -> None:
    path = climb.start()
    runner = FakeRunner(failures=lambda _config: ("diverged", "the loss at step 3 is not finite"))
    with pytest.raises(DrivetrainError, match=r"baseline .* diverged: the loss at step 3"):
        climb_tune(path, runner=runner, gate=FakeGate())
    from drivetrain.archive.tunes import open_tune

    assert open_tune(path).document["status"] == "failed"


@pytest.mark.parametrize("outcome", ["hang", "crash"])
def test_a_baseline_that_failed_is_profiled_again_when_the_tune_goes_on(climb: Climb, outcome: Any) -> None:
    path = climb.start(only=("fused_adamw",))
    with pytest.raises(DrivetrainError, match=outcome):
        climb_tune(path, runner=FakeRunner(failures=lambda _config: (outcome, "once")), gate=FakeGate())
    tune = climb_tune(path, runner=FakeRunner(), gate=FakeGate())
    assert tune.document["status"] == "finished"
    assert steps(tune)["fused_adamw"]["kept"]


def test_an_illegal_baseline_is_refused_before_anything_runs(climb: Climb) -> None:
    runner = FakeRunner()
    path = climb.start(overrides=("training.global_batch_size=10",))
    with pytest.raises(ConfigurationError, match="global_batch_size"):
        climb_tune(path, runner=runner, gate=FakeGate())
    assert runner.started == []


def test_a_budget_too_small_for_one_trial_says_what_would_do(climb: Climb) -> None:
    runner = FakeRunner()
    path = climb.start(budget_s=10.0)
    with pytest.raises(DrivetrainError, match=r"too small for one trial.* give --budget (\d+)s") as raised:
        climb_tune(path, runner=runner, gate=FakeGate())
    assert [verb for verb, _ in runner.started] == ["profile"]
    least = int(str(raised.value).rpartition("--budget ")[2].partition("s")[0])
    # What was said to do does, and the baseline is not profiled again.
    tune = climb_tune(path, budget_s=float(least), runner=runner, gate=FakeGate())
    assert tune.document["steps"]
    assert [verb for verb, name in runner.started if name == "baseline"] == ["profile"]


@pytest.mark.parametrize("budget_s", [200, 300, 400, 600, 900])
def test_what_would_not_fit_the_budget_is_not_started(climb: Climb, budget_s: float) -> None:
    document = climb(budget_s=float(budget_s)).document
    assert document["status"] == "finished"
    assert document["spent_s"] <= budget_s
    everything = climb().document
    entries = [step["entry"] for step in document["steps"]]
    assert set(entries) <= {step["entry"] for step in everything["steps"]}
    assert entries[0] == "data_workers"
    if len(document["steps"]) < len(everything["steps"]):
        assert any("the budget left no room" in finding for finding in document["findings"])
    if any(step["kept"] for step in document["steps"]):
        assert document["final_gate"]["verdict"] == "pass"


def test_the_printed_document_is_the_contract(climb: Climb) -> None:
    printed = contract(climb().document)
    assert {"tune", "baseline", "final", "speed_up", "steps"} <= printed.keys()
    assert set(printed["speed_up"]) == {"ratio", "low", "high"}
    for step in printed["steps"]:
        assert {"change", "treats", "predicted", "measured", "memory_bytes", "gate", "kept"} <= step.keys()
        assert set(step["measured"]) == {"ratio", "low", "high"}
        assert set(step["gate"]) == {"tier", "verdict", "why"}
