"""A trial over a runner whose runs cost nothing: what is run, what counts, and what becomes of failures."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_runs import BASELINE, FakeRunner, classes_of

from drivetrain.archive.reader import open_run
from drivetrain.config import RunConfig, load_config, to_toml
from drivetrain.tune.moves import Change, changed
from drivetrain.tune.trainer import Attempt, Outcome
from drivetrain.tune.trial import TrialResult, TrialSettings, run_trial
from drivetrain.tune.trial_statistics import Noise


class Bench:
    """A parent and a candidate in files, and trials of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "base.toml").write_text(BASELINE)
        self.parent = load_config(str(folder / "base.toml")).config

    def __call__(
        self,
        change: Mapping[str, Any],
        runner: FakeRunner,
        settings: TrialSettings | None = None,
        **options: Any,
    ) -> TrialResult:
        for name, config in (("a", self.parent), ("b", changed(self.parent, Change(change)))):
            (self.folder / f"{name}.toml").write_text(to_toml(config))
        return run_trial(
            self.folder / "a.toml",
            self.folder / "b.toml",
            trainer=runner,
            runs_dir=self.folder / "runs",
            name="t",
            settings=settings or TrialSettings(steps=4),
            **options,
        )


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    return Bench(tmp_path)


FUSED = {"optimizer.fused": True}


def test_blocks_are_a_b_b_a_and_each_counts_only_its_steady_steps(bench: Bench) -> None:
    result = bench(FUSED, FakeRunner())
    assert [block.side for block in result.blocks] == ["A", "B", "B", "A"]
    assert all(block.steps == 4 for block in result.blocks)
    assert result.faster
    assert result.judgement is not None
    assert result.judgement.measured.ratio == pytest.approx(0.100 / 0.090)
    for block in result.blocks:
        assert block.run is not None
        config = open_run(Path(block.run)).config()
        assert config.training.train_iters == 7, "two of warm-up, and one that the thread had ready"
        assert config.lr_schedule.lr_decay_tokens == 400 * 8 * 32
        assert config.optimizer.fused == (block.side == "B")


def test_steps_that_workers_or_a_thread_had_ready_are_left_out(bench: Bench) -> None:
    result = bench({"data.num_workers": 3, "data.prefetch_factor": 2}, FakeRunner())
    # Six micro-batches ready, two a step: three steps more are run, and not counted; of the parent's thread one.
    assert [block.steps for block in result.blocks] == [4, 4, 4, 4]
    lengths = [len(open_run(Path(block.run or "")).metrics()) for block in result.blocks]
    assert lengths == [7, 9, 9, 7]


def drifting(per_block: Callable[[int], float]) -> FakeRunner:
    """Runs whose speed depends on how many came before."""
    runner = FakeRunner()

    def model(config: RunConfig) -> dict[str, float]:
        factor = per_block(len(runner.started) - 1)
        return {name: seconds * factor for name, seconds in classes_of(config).items()}

    runner.model = model
    return runner


def test_an_undecided_trial_gets_its_second_look_and_no_third(bench: Bench) -> None:
    noisy = (1.1, 0.9, 1.1, 0.9, 1.0, 1.2, 0.8, 1.0)
    said: list[str] = []
    result = bench(FUSED, drifting(lambda number: noisy[number]), progress=said.append)
    assert "".join(block.side for block in result.blocks) == "ABBABAAB"
    assert not result.faster
    assert result.judgement is not None
    assert result.judgement.state == "undecided"
    assert "noisier than the effect" in result.why
    assert any("1 more times four blocks" in message for message in said)


def test_a_steady_drift_of_the_machine_hides_nothing_in_two_units(bench: Bench) -> None:
    settings = TrialSettings(steps=4, looks=(2,))
    result = bench(FUSED, drifting(lambda number: 1.02**number), settings)
    assert result.faster
    assert result.judgement is not None
    assert result.judgement.measured.ratio == pytest.approx(0.100 / 0.090)


@pytest.mark.parametrize("outcome", ["out_of_memory", "crash", "hang", "diverged", "refused"])
def test_the_first_failed_block_ends_the_trial(bench: Bench, outcome: Outcome) -> None:
    runner = FakeRunner(failures=lambda config: (outcome, "too bad") if config.optimizer.fused else None)
    result = bench(FUSED, runner)
    assert [block.outcome for block in result.blocks] == ["finished", outcome]
    assert (result.outcome, result.judgement, result.faster) == (outcome, None, False)
    assert "the candidate" in result.why
    assert "too bad" in result.why


def test_a_parent_that_fails_is_not_held_against_the_candidate(bench: Bench) -> None:
    runner = FakeRunner(failures=lambda config: None if config.optimizer.fused else ("crash", "gone"))
    result = bench(FUSED, runner)
    assert len(result.blocks) == 1
    assert result.why.startswith("the parent itself: crash")


def test_a_median_does_not_hide_steps_that_eat_the_gain(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuttering(FakeRunner):
        """Every fifth steady step of the candidate takes ten times as long."""

        def step_s(self, config: RunConfig, step: int, step_s: float) -> float:
            return step_s * 10 if config.optimizer.fused and step % 5 == 0 else step_s

    result = bench(FUSED, Stuttering(), TrialSettings(steps=20))
    assert result.judgement is not None
    assert result.judgement.state == "faster"
    assert not result.faster
    assert "not by the mean" in result.why


def test_a_larger_batch_may_take_longer_by_as_much_before_it_is_called_a_hang(bench: Bench) -> None:
    class Timed(FakeRunner):
        allowed: list[float | None]

        def train(self, config: Path, overrides: Any, **options: Any) -> Attempt:
            self.allowed = [*getattr(self, "allowed", []), options["timeout_s"]]
            return super().train(config, overrides, **options)

    for change, times in ((FUSED, 1), ({"training.global_batch_size": 96}, 12)):
        runner = Timed()
        result = bench(change, runner)
        assert runner.allowed[0] is None
        assert runner.allowed[1] == pytest.approx(5 * times * result.blocks[0].elapsed_s + 300)


def test_earlier_noise_raises_the_least_effect(bench: Bench) -> None:
    assert bench(FUSED, FakeRunner(), noise=Noise(10 * 0.03**2, 10)).faster
    assert not bench(FUSED, FakeRunner(), noise=Noise(10 * 0.10**2, 10)).faster


def test_checkpoints_of_blocks_are_removed(bench: Bench) -> None:
    class Saving(FakeRunner):
        def train(self, *arguments: Any, **options: Any) -> Any:
            attempt = super().train(*arguments, **options)
            (attempt.run / "checkpoints" / "step-6").mkdir(parents=True)
            return attempt

    bench(FUSED, Saving())
    assert list((bench.folder / "runs").glob("*/checkpoints")) == []


def test_a_candidate_whose_change_is_not_recorded_or_not_requested_is_without_effect(bench: Bench) -> None:
    runner = FakeRunner()
    assert bench(FUSED, runner, must_be_active="fused_adamw").faster
    runner.records = lambda records: [one for one in records if one["name"] != "fused_adamw"]
    result = bench(FUSED, runner, must_be_active="fused_adamw")
    assert (len(result.blocks), result.faster) == (2, False)
    assert result.why == "without effect: the run has no record of fused_adamw"
    runner.records = lambda records: [{**one, "requested": False} for one in records]
    result = bench(FUSED, runner, must_be_active="fused_adamw")
    assert (len(result.blocks), result.faster) == (2, False)
    assert result.why == "without effect: fused_adamw was not requested in the run"


@pytest.mark.parametrize("folder", ["none", '"quoted"', "a #b"])
def test_runs_lie_where_they_were_asked_for_whatever_the_folder_is_called(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.chdir(bench.folder)
    for name, config in (("a", bench.parent), ("b", changed(bench.parent, Change(FUSED)))):
        (bench.folder / f"{name}.toml").write_text(to_toml(config))
    result = run_trial(
        bench.folder / "a.toml",
        bench.folder / "b.toml",
        trainer=FakeRunner(),
        runs_dir=Path(folder),
        name="t",
        settings=TrialSettings(steps=4),
    )
    assert len(result.blocks) == 4
    assert all(Path(block.run or "").parent == Path(folder) for block in result.blocks)


def test_a_trial_survives_its_way_through_json(bench: Bench) -> None:
    import json

    document = bench(FUSED, FakeRunner()).to_document()
    assert json.loads(json.dumps(document)) == document
    assert document["measured"]["low"] <= document["measured"]["ratio"] <= document["measured"]["high"]
