"""A migration brings in one difference at a time, leaves out what its gate refuses, and claims only what it ran."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_runs import DAY, FakeRunner
from test_migrate_rungs import IMPORTED

from drivetrain.archive import tunes
from drivetrain.archive.tunes import Tune, open_tune
from drivetrain.config import LoadedConfig, RunConfig, load_config, parse_config
from drivetrain.errors import DrivetrainError, RunError
from drivetrain.tune.gate import Tier, Verdict
from drivetrain.tune.ladder_settings import LadderSettings
from drivetrain.tune.migrate_session import climb_migration, is_migration, migration_contract, start_migration
from drivetrain.tune.trainer import Trainer


class Gate:
    """Passes all but what it is told to judge otherwise; a gate costs a run of each side."""

    def __init__(self, verdicts: Callable[[RunConfig], str] = lambda _config: "pass") -> None:
        self.verdicts = verdicts
        self.held: list[tuple[str, tuple[int, int]]] = []

    def __call__(
        self, baseline: Path, candidate: Path, tier: Tier, trainer: Trainer, sizes: tuple[int, int]
    ) -> Verdict:
        runs = f"run.runs_dir={baseline.parent.parent / 'runs'}"
        for side in (baseline, candidate):
            trainer.train(side, ["run.name=gate", runs, "training.train_iters=4"])
        self.held.append((tier, sizes))
        answer: Any = self.verdicts(load_config(str(candidate)).config)
        return Verdict(tier, answer, f"said to be {answer}")


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # Nobody pulls the plug here.


def start(folder: Path, text: str = IMPORTED, *, nproc: int = 8, budget_s: float = DAY) -> Path:
    loaded = LoadedConfig(parse_config(text), "imported.toml", "imported")
    settings = LadderSettings(budget_s=budget_s, trial_steps=4, world_size=nproc)
    return start_migration(loaded, [], settings, folder / "tunes", num_threads=1)


def migrate(folder: Path, gate: Gate | None = None, runner: FakeRunner | None = None, **options: Any) -> Tune:
    return climb_migration(start(folder, **options), runner=runner or FakeRunner(), gate=gate or Gate())


def states(tune: Tune) -> dict[str, str]:
    return {rung["name"]: rung["state"] for rung in tune.document["rungs"]}


def final_of(tune: Tune) -> RunConfig:
    return load_config(str(tune.path / tune.document["migrated"]["config"])).config


def test_everything_that_passes_is_the_imported_configuration(tmp_path: Path) -> None:
    gate = Gate()
    tune = migrate(tmp_path, gate)
    assert is_migration(tune)
    assert set(states(tune).values()) == {"proven"}
    assert final_of(tune) == parse_config(IMPORTED)
    plain, *rungs = tune.document["rungs"]
    assert plain["name"] == "plain start"
    assert all(rung["step_s"] is not None and rung["peak_memory_bytes"] is not None for rung in rungs)
    # One process to one, then to two, four and eight; the last gate holds everything against the plain start.
    assert gate.held[0] == ("exact", (1, 1))
    assert [sizes for _, sizes in gate.held[2:6]] == [(1, 2), (2, 2), (2, 4), (4, 8)]
    assert gate.held[-1] == ("statistical", (1, 8))
    assert tune.document["final_gate"]["verdict"] == "pass"


def test_a_rung_that_fails_its_gate_is_named_and_left_out(tmp_path: Path) -> None:
    gate = Gate(lambda config: "fail" if config.fusion.level == "core" else "pass")
    tune = migrate(tmp_path, gate)
    assert states(tune)["fusion_level"] == "left out"
    assert final_of(tune).fusion.level == "off"
    assert final_of(tune).fusion.attention == "auto"
    assert any("fusion_level is left out" in finding for finding in tune.document["findings"])
    assert "# left out" in (tune.path / "configs" / "final.toml").read_text()


def test_what_does_not_fit_this_machine_is_said_to_be_unproven_and_kept(tmp_path: Path) -> None:
    gate = Gate()
    tune = migrate(tmp_path, gate, nproc=2)
    found = states(tune)
    assert found["tensor parallelism"] == "proven"
    for name in ("pipeline", "data parallelism", "ZeRO", "overlap_param_gather", "ddp_bucket"):
        assert found[name] == "not proven here", name
    reasons = {rung["name"]: rung["why"] for rung in tune.document["rungs"]}
    assert reasons["pipeline"] == "it needs 4 processes, and 2 may run here (--nproc)"
    assert all(max(sizes) <= 2 for _, sizes in gate.held)
    assert final_of(tune) == parse_config(IMPORTED)
    text = (tune.path / "configs" / "final.toml").read_text()
    assert "# not proven here\npipeline_model_parallel_size = 2" in text
    assert "# proven, gate round-off\ntensor_model_parallel_size = 2" in text


def test_a_layout_that_fails_takes_with_it_what_needs_it(tmp_path: Path) -> None:
    gate = Gate(lambda config: "fail" if config.parallelism.tensor_model_parallel_size > 1 else "pass")
    tune = migrate(tmp_path, gate)
    assert states(tune)["tensor parallelism"] == "left out"
    assert states(tune)["sequence parallelism"] == "not proven here"
    assert final_of(tune).parallelism.tensor_model_parallel_size == 1


def test_a_run_that_ends_badly_is_a_rung_that_is_left_out(tmp_path: Path) -> None:
    def failures(config: RunConfig) -> Any:
        return ("crash", "no such kernel") if config.data.num_workers else None

    tune = migrate(tmp_path, runner=FakeRunner(failures=failures))
    assert states(tune)["data_workers"] == "left out"
    assert "no such kernel" in tune.document["rungs"][-1]["why"]
    assert final_of(tune).data.num_workers == 0


def test_what_had_no_effect_is_not_proven(tmp_path: Path) -> None:
    text = IMPORTED.replace('level = "core"', 'level = "core"\ncompile = true')
    runner = FakeRunner(inactive=lambda config: "no compiler" if config.fusion.compile else None)
    tune = migrate(tmp_path, runner=runner, text=text)
    assert states(tune)["compile"] == "not proven here"
    reasons = {rung["name"]: rung["why"] for rung in tune.document["rungs"]}
    assert reasons["compile"] == "without effect here: no compiler"
    assert final_of(tune).fusion.compile


def test_what_does_not_pass_together_gives_no_final_configuration(tmp_path: Path) -> None:
    def verdicts(config: RunConfig) -> str:
        return "pass"

    gate = Gate(verdicts)
    path = start(tmp_path)
    asked = {"gates": 0}

    def judge(
        baseline: Path, candidate: Path, tier: Tier, trainer: Trainer, sizes: tuple[int, int]
    ) -> Verdict:
        asked["gates"] += 1
        verdict = gate(baseline, candidate, tier, trainer, sizes)
        return Verdict(tier, "fail", "they drift apart") if sizes == (1, 8) else verdict

    tune = climb_migration(path, runner=FakeRunner(), gate=judge)
    assert tune.document["migrated"] is None
    assert any("there is no final configuration" in finding for finding in tune.document["findings"])


def test_a_plain_start_that_is_not_proven_ends_it(tmp_path: Path) -> None:
    tune = migrate(tmp_path, Gate(lambda _config: "fail"))
    assert states(tune) == {"plain start": "left out"}
    assert tune.document["migrated"] is None
    with pytest.raises(
        DrivetrainError, match="the plain start cannot be trained, it ended as crash: no data"
    ):
        migrate(tmp_path / "b", runner=FakeRunner(failures=lambda _config: ("crash", "no data")))


def test_a_budget_that_is_used_up_leaves_rungs_untried(tmp_path: Path) -> None:
    tune = migrate(tmp_path, budget_s=10.0)
    found = list(states(tune).values())
    assert found[0] == "proven"
    assert "not tried" in found
    assert migration_contract(tune.document)["status"] == "finished"


SMALL = """
[parallelism]
data_parallel_size = 2

[optimizer]
fused = false

[precision]
params_dtype = "bf16"

[data]
num_workers = 2
"""


class Killed(BaseException):
    """The process is gone: nobody catches it."""


def of_results(document: Mapping[str, Any]) -> Any:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: without(item) for key, item in value.items() if key not in ("run", "tune", "created")
            }
        return [without(item) for item in value] if isinstance(value, list) else value

    return without({key: document[key] for key in document if key not in ("machine", "directory")})


def test_killed_at_any_write_of_its_state_it_ends_the_same_and_repeats_nothing_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A layout, a precision and what is exact: every kind of gate.
    text = IMPORTED.partition("[parallelism]")[0] + SMALL
    once = FakeRunner()
    expected = of_results(migrate(tmp_path / "a", runner=once, text=text).document)
    write = tunes.write_json
    seen: set[str] = set()

    def killing(path: Path, document: Any) -> None:
        write(path, document)
        key = json.dumps([len(document["pieces"]), document["status"]])
        if key not in seen:
            seen.add(key)
            raise Killed

    runner = FakeRunner()
    path = start(tmp_path / "b", text=text)
    monkeypatch.setattr(tunes, "write_json", killing)
    kills = 0
    while open_tune(path).document["status"] != "finished":
        try:
            climb_migration(path, runner=runner, gate=Gate())
        except Killed:
            kills += 1
    assert kills > 10
    assert of_results(open_tune(path).document) == expected
    assert runner.started == once.started
    with pytest.raises(RunError, match="is finished"):
        climb_migration(path, runner=runner, gate=Gate())
