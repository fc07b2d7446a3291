"""The whole tune, with answers that need no process: budget, interruption, going on, what the file holds."""

from pathlib import Path

import pytest
import torch
from test_recording import tiny
from tuning_examples import BAD, MODULE, Asked, norm_call, recorded, with_backends

from drivetrain.config import RunConfig
from drivetrain.engine.ops._operator_code import operator_code
from drivetrain.engine.ops._tuned_key import key_of
from drivetrain.engine.ops.tuned_file import TunedFile, parse_entries
from drivetrain.engine.ops_tuning.processes import Answer
from drivetrain.engine.ops_tuning.session import Report, Settings, tune_calls, tune_configuration
from drivetrain.engine.ops_tuning.writing import write_tuned
from drivetrain.errors import DrivetrainError, EnvironmentFault

CONFIG: RunConfig = tiny("data.reset_attention_mask=false", "training.eval_iters=0", "run.num_threads=1")
WIDTHS = (16, 32, 48)
TWO = with_backends("eager", "quick")


def tune(path: Path, ask: Asked, budget_s: float = 600.0, fresh: bool = False, operator=TWO) -> Report:
    calls = [recorded(norm_call(width=width), operator) for width in WIDTHS]
    settings = Settings(budget_s, ask=ask, fresh=fresh, module_of=lambda _: MODULE)
    return tune_calls(CONFIG, calls, settings, path, progress=lambda _: None)


def statuses(report: Report) -> list[str]:
    return [one.status for one in report.outcomes]


def test_the_fastest_that_is_right_is_written_with_all_that_was_tried(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tuned.toml"
    operator = with_backends("eager", "quick", "wrong", "elsewhere")
    ask = Asked({"quick": 0.25, "wrong": 0.1}, {"wrong": "output 0: relative error 1e-2"})
    assert statuses(tune(path, ask, operator=operator)) == ["tuned"] * 3
    found = TunedFile.read(
        path, environment=parse_entries(path.read_bytes(), path)[0], modules={"rms_norm": MODULE}
    )
    assert found.problems == ()
    assert found.backend_for(norm_call(width=32)) == "quick"
    entry = found.entries[0]
    assert entry.reason == "75.0% less time than eager; 3.0% were needed"
    assert entry.graded_tokens == (24, 23)
    assert entry.calls_per_step == 3.0
    by_name = {one.backend: one for one in entry.candidate}
    assert list(by_name) == ["eager", "quick", "wrong", "elsewhere"]
    assert (by_name["quick"].seconds, by_name["quick"].peak_bytes) == (0.25, 1024)
    assert by_name["wrong"].rejected == "wrong: output 0: relative error 1e-2"
    assert by_name["elsewhere"].rejected == "cannot serve: it needs another device"
    assert "elsewhere" not in [request.get("backend") for request in ask.requests]


def test_a_choice_is_that_of_the_code_it_was_measured_on(tmp_path: Path) -> None:
    tune(tmp_path / "t.toml", Asked())
    _, entries = parse_entries((tmp_path / "t.toml").read_bytes(), tmp_path)
    assert {one.code for one in entries} == {operator_code(MODULE)}


def test_what_the_budget_does_not_reach_is_said_and_not_written(tmp_path: Path, monkeypatch) -> None:
    path, clock = tmp_path / "t.toml", [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def forty_seconds(_: int) -> None:
        clock[0] += 40.0

    # Two grades and a timing each: the first is finished after 120 s, the second would be after 240 s.
    report = tune(path, Asked(after=forty_seconds), budget_s=200.0)
    assert statuses(report) == ["tuned", "not reached", "not reached"]
    _, entries = parse_entries(path.read_bytes(), path)
    assert len(entries) == 1
    again = Asked()
    assert statuses(tune(path, again)) == ["kept", "tuned", "tuned"]
    assert len(again.requests) == 6


def test_a_process_that_the_budget_cut_short_is_no_fault_of_its_backend(tmp_path: Path, monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def slow(request, *, limit_s: float) -> Answer:
        clock[0] += limit_s
        return Answer(None, f"it took more than {limit_s:.0f} s", True, limit_s)

    report = tune(tmp_path / "t.toml", slow, budget_s=100.0)  # type: ignore[arg-type]
    assert statuses(report) == ["not reached"] * 3
    clock[0] = 0.0
    report = tune(tmp_path / "t.toml", slow, budget_s=1e4)  # type: ignore[arg-type]
    assert statuses(report) == ["failed"] * 3
    assert "eager: it took more than 180 s" in report.outcomes[0].reason


def test_a_last_candidate_that_the_budget_cut_short_leaves_nothing_written(
    tmp_path: Path, monkeypatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    right = Asked()

    def quick_takes_too_long(request, *, limit_s: float) -> Answer:
        if request["backend"] == "eager":
            return right(request, limit_s=limit_s)
        clock[0] += limit_s
        return Answer(None, f"it took more than {limit_s:.0f} s", True, limit_s)

    report = tune(tmp_path / "t.toml", quick_takes_too_long, budget_s=100.0)  # type: ignore[arg-type]
    assert statuses(report) == ["not reached"] * 3
    assert not (tmp_path / "t.toml").exists()


def test_an_interrupted_tune_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"

    def interrupt(number: int) -> None:
        if number == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(path, Asked(after=interrupt))
    before = path.read_bytes()
    again = Asked()
    assert statuses(tune(path, again)) == ["kept", "tuned", "tuned"]
    assert len(again.requests) == 6
    assert parse_entries(before, path)[1][0] in parse_entries(path.read_bytes(), path)[1]
    assert statuses(tune(path, none := Asked())) == ["kept"] * 3
    assert none.requests == []
    assert statuses(tune(path, Asked(), fresh=True)) == ["tuned"] * 3


def test_begun_anew_for_some_operators_the_file_keeps_what_it_has_of_others(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"

    def run(*only: str, fresh: bool = False) -> dict[str, str]:
        settings = Settings(600.0, ask=Asked(), fresh=fresh)
        report = tune_configuration(CONFIG, settings, path, only=only, progress=lambda _: None)
        return {one.operator: one.status for one in report.outcomes}

    assert run("glu", "attention") == {"glu": "tuned", "attention": "tuned"}
    assert run("glu", fresh=True) == {"glu": "tuned"}
    assert run("glu", "attention") == {"glu": "kept", "attention": "kept"}
    # Beside what is measured here nothing of another environment may stand.
    write_tuned(path, {"torch": "1.0"}, parse_entries(path.read_bytes(), path)[1])
    assert run("glu", fresh=True) == {"glu": "tuned"}
    assert {one.operator for one in parse_entries(path.read_bytes(), path)[1]} == {"glu"}


def test_what_is_kept_is_reported_as_often_as_this_configuration_calls_it(tmp_path: Path) -> None:
    tune(tmp_path / "t.toml", Asked())
    settings = Settings(600.0, ask=Asked(), module_of=lambda _: MODULE)
    again = [recorded(norm_call(width=16), TWO, 48.0)]
    (one,) = tune_calls(CONFIG, again, settings, tmp_path / "t.toml", progress=lambda _: None).outcomes
    assert one.status == "kept"
    assert one.entry is not None
    assert one.entry.calls_per_step == one.calls_per_step == 48.0


@pytest.mark.parametrize("name", ["taken/folder/t.toml", "folder"])
def test_a_file_that_could_not_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "taken").touch()
    (tmp_path / "folder").mkdir()
    ask = Asked()
    with pytest.raises(EnvironmentFault, match="with --output"):
        tune(tmp_path / name, ask)
    assert ask.requests == []


def test_a_backend_that_alone_can_serve_is_written_untried(tmp_path: Path) -> None:
    ask = Asked()
    report = tune(tmp_path / "t.toml", ask, operator=with_backends("eager", "elsewhere"))
    assert ask.requests == []
    entry = report.outcomes[0].entry
    assert entry is not None
    assert (entry.backend, entry.reason, entry.graded_tokens) == ("eager", "no other can serve it here", ())


def test_where_no_backend_is_right_nothing_is_written(tmp_path: Path) -> None:
    report = tune(tmp_path / "t.toml", Asked(problems={"eager": "all wrong", "quick": "half wrong"}))
    assert statuses(report) == ["failed"] * 3
    assert "eager: wrong: all wrong; quick: wrong: half wrong" in report.outcomes[0].reason
    assert not (tmp_path / "t.toml").exists()


def test_one_that_alone_is_right_is_chosen_without_timing(tmp_path: Path) -> None:
    ask = Asked(problems={"eager": "all wrong"})
    report = tune(tmp_path / "t.toml", ask)
    entry = report.outcomes[0].entry
    assert entry is not None
    assert (entry.backend, entry.reason) == ("quick", "the only one that is right here")
    assert {request["do"] for request in ask.requests} == {"grade"}


def test_a_file_of_another_environment_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    write_tuned(path, {"torch": "1.0"}, ())
    before = path.read_bytes()
    with pytest.raises(DrivetrainError, match=r"torch: 1\.0 there.*--fresh"):
        tune(path, Asked())
    assert path.read_bytes() == before
    assert statuses(tune(path, Asked(), fresh=True)) == ["tuned"] * 3


def test_entries_of_former_code_are_dropped_and_tuned_again(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    tune(path, Asked())
    text = path.read_text()
    path.write_text(text.replace(operator_code(MODULE), "0" * 16, 1))
    report = tune(path, Asked())
    assert report.dropped == 1
    assert sorted(statuses(report)) == ["kept", "kept", "tuned"]
    assert "0" * 16 not in path.read_text()


def test_deterministic_runs_choose_among_deterministic_backends(tmp_path: Path) -> None:
    from dataclasses import replace

    loose = replace(TWO, backends=(TWO.backends[0], replace(TWO.backends[1], deterministic=False)))
    config = tiny("data.reset_attention_mask=false", "run.deterministic=true")
    ask = Asked({"quick": 0.1})
    settings = Settings(600.0, ask=ask, module_of=lambda _: MODULE)
    report = tune_calls(
        config, [recorded(norm_call(), loose)], settings, tmp_path / "t.toml", progress=lambda _: None
    )
    entry = report.outcomes[0].entry
    assert entry is not None
    assert entry.backend == "eager"
    assert "other bits each time" in (entry.candidate[1].rejected or "")
    assert entry.call == key_of(norm_call(), deterministic=True).call


def test_the_calls_of_a_configuration_are_tuned_with_the_layout_that_was_chosen(tmp_path: Path) -> None:
    def run(path: Path, seconds: dict[str, float]) -> list[str]:
        settings = Settings(600.0, ask=Asked(seconds))
        report = tune_configuration(CONFIG, settings, path, progress=lambda _: None)
        assert set(statuses(report)) <= {"tuned", "kept"}
        assert report.outcomes[0].operator in ("qkv_product", "gate_up_product")
        return [one.operator for one in report.outcomes if "with gaps" in one.call]

    assert run(tmp_path / "joined.toml", {"joined": 0.5}).count("rotary") == 2
    assert run(tmp_path / "separate.toml", {}) == []


def test_operators_can_be_named_and_unknown_ones_are_refused_with_those_that_can_be(tmp_path: Path) -> None:
    settings = Settings(600.0, ask=Asked())
    report = tune_configuration(CONFIG, settings, tmp_path / "t.toml", only=["glu"], progress=lambda _: None)
    assert [one.operator for one in report.outcomes] == ["glu"]
    with pytest.raises(DrivetrainError, match=r"--operator glue: no model asks for it; .*glu"):
        tune_configuration(CONFIG, settings, tmp_path / "t.toml", only=["glue"], progress=lambda _: None)


@pytest.mark.long
def test_bad_backends_are_found_by_real_processes_and_the_quick_one_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuning_examples import FOLDER, OPERATOR

    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    settings = Settings(280.0, candidate_s=25.0, module_of=lambda _: MODULE)
    path = tmp_path / "t.toml"
    (outcome,) = tune_calls(
        CONFIG, [recorded(norm_call(), OPERATOR)], settings, path, progress=lambda _: None
    ).outcomes
    entry = outcome.entry
    assert entry is not None, outcome.reason
    assert entry.backend == "quick"
    rejected = {one.backend: one.rejected or "" for one in entry.candidate if one.rejected is not None}
    assert set(rejected) == {*BAD, "elsewhere"}
    assert rejected["crashing"] == "it was ended by SIGSEGV"
    assert rejected["hanging"] == "it took more than 25 s"
    assert torch.get_num_threads() >= 1
