"""The gate over real runs of a tiny model: what passes, what fails, what is made, found, refused and named."""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_in_process import InProcessTrainer

from drivetrain.archive.origin import RunOrigin, change_between
from drivetrain.archive.reader import Run, open_run
from drivetrain.config import RunConfig, load_config, to_toml
from drivetrain.engine.creation import create_run
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.parallel.process_group import Ranks
from drivetrain.engine.random_state import deterministic
from drivetrain.engine.step import Stepper
from drivetrain.engine.worker import work
from drivetrain.errors import DrivetrainError, RunError
from drivetrain.tune import gate_plan, gate_runs
from drivetrain.tune.gate import Evidence, Leak, Tier
from drivetrain.tune.gate_change import tier_of_change
from drivetrain.tune.gate_files import read_evidence, read_gradients
from drivetrain.tune.gate_runs import GateSettings, gate_of_runs, run_gate
from drivetrain.tune.trainer import Attempt, Outcome
from runs_on_the_spot import Tiny

SHORT = GateSettings(exact_steps=20, roundoff_steps=20, statistical_steps=20, looks=(3,), eval_iters=2)


class Files:
    """TOML files of variants of the tiny configuration."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        self.folder = tiny.folder / "gate"

    def variant(self, name: str, **sections: dict[str, Any]) -> Path:
        overrides = [
            f"{section}.{leaf}={value}"
            for section, leaves in sections.items()
            for leaf, value in leaves.items()
        ]
        path = self.tiny.folder / f"{name}.toml"
        path.write_text(to_toml(load_config(str(self.tiny.file), overrides).config))
        return path


@pytest.fixture
def files(tiny: Tiny) -> Files:
    return Files(tiny)


def scaled_gradients(factor: float) -> Any:
    """Around a run of a configuration with the bucket size 7: its gradients are ``factor`` times too large."""

    @contextmanager
    def wrong() -> Iterator[None]:
        backward = Stepper.backward
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Stepper,
                "backward",
                lambda self, loss, tokens: backward(self, factor * loss, tokens),
            )
            yield

    def around(config: RunConfig) -> AbstractContextManager[None]:
        return wrong() if config.overlap.bucket_size_mb == 7 else nullcontext()

    return around


def judge(
    files: Files, candidate: Path, tier: Any, trainer: Any = None, settings: GateSettings = SHORT
) -> Any:
    baseline = files.variant("baseline")
    return run_gate(
        baseline,
        candidate,
        tier,
        trainer=trainer or InProcessTrainer(),
        folder=files.folder,
        settings=settings,
    )


def test_data_workers_pass_the_exact_tier_and_nothing_is_trained_twice(files: Files) -> None:
    candidate = files.variant("candidate", data={"num_workers": 1})
    trainer = InProcessTrainer()
    found = judge(files, candidate, "exact", trainer)
    assert found.verdict == "pass", found.why
    assert found.numbers["steps"] == 20
    assert len(trainer.trained) == 2
    again = judge(files, candidate, "exact", trainer)
    assert (again, len(trainer.trained)) == (found, 2), "finished runs are taken as they are"


def test_a_planted_harm_fails_the_exact_tier(files: Files) -> None:
    candidate = files.variant("candidate", overlap={"bucket_size_mb": 7})
    found = judge(files, candidate, "exact", InProcessTrainer(scaled_gradients(1.001)))
    assert found.verdict == "fail"
    assert found.numbers["first_differing_step"] == 1


@pytest.mark.long
def test_runs_of_other_code_are_made_again(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = files.variant("candidate", overlap={"bucket_size_mb": 5})
    trainer = InProcessTrainer()
    judge(files, candidate, "exact", trainer)
    other = {**gate_plan.this_code(), "commit": "another"}
    monkeypatch.setattr(gate_runs, "this_code", lambda: other)
    judge(files, candidate, "exact", trainer)
    assert len(trainer.trained) == 4


@pytest.mark.long
def test_another_order_of_the_same_arithmetic_passes_the_round_off_tier(files: Files) -> None:
    candidate = files.variant("candidate", training={"micro_batch_size": 2})
    trainer = InProcessTrainer()
    found = judge(files, candidate, "round-off", trainer)
    assert found.verdict == "pass", found.why
    assert found.numbers["perturbations"] == 3
    assert sum("--perturb-ulp" in run for run in trainer.trained) == 3
    assert sum("--probe" in run for run in trainer.trained) == 5


def test_summed_gradients_fail_the_round_off_tier_though_the_optimizer_hides_them(files: Files) -> None:
    candidate = files.variant("candidate", overlap={"bucket_size_mb": 7})
    found = judge(files, candidate, "round-off", InProcessTrainer(scaled_gradients(2.0)))
    assert found.verdict == "fail"
    assert "log norm ratio = 0.693" in found.why


def test_bf16_passes_the_statistical_tier(files: Files) -> None:
    candidate = files.variant("candidate", precision={"params_dtype": "bf16"})
    trainer = InProcessTrainer()
    found = judge(files, candidate, "statistical", trainer)
    assert found.verdict == "pass", found.why
    assert len(trainer.trained) == 6
    assert found.numbers["pairs"] == 3
    seeds = {word for run in trainer.trained for word in run if word.startswith("run.seed=")}
    assert seeds == {"run.seed=1235", "run.seed=1236"}, "the first pair has the baseline's own"
    assert all("data.seed=1234" in run for run in trainer.trained), "one data order"


def test_a_higher_learning_rate_does_not_pass(files: Files) -> None:
    candidate = files.variant("candidate", optimizer={"lr": 3e-2})
    found = judge(files, candidate, "statistical")
    assert found.verdict in ("fail", "suspicious"), found.why


@pytest.mark.long
def test_a_looked_at_pair_comes_before_the_next_is_trained(files: Files) -> None:
    candidate = files.variant("candidate", data={"num_workers": 0}, overlap={"bucket_size_mb": 5})
    trainer = InProcessTrainer()
    settings = GateSettings(statistical_steps=20, looks=(2, 8), eval_iters=2)
    found = judge(files, candidate, "statistical", trainer, settings)
    assert (found.verdict, len(trainer.trained)) == ("pass", 4), "the first look was enough"


@pytest.mark.long
def test_another_batch_is_trained_and_evaluated_on_equal_tokens(files: Files) -> None:
    candidate = files.variant("candidate", training={"global_batch_size": 16})
    trainer = InProcessTrainer()
    found = judge(files, candidate, "statistical", trainer)
    assert found.verdict != "not comparable", found.why
    settings = {word for run in trainer.trained for word in run if word.startswith("training.")}
    assert {"training.train_iters=20", "training.train_iters=10"} <= settings
    assert {"training.eval_iters=2", "training.eval_iters=1"} <= settings
    apart = judge(files, candidate, "round-off", trainer)
    assert apart.verdict == "not comparable"
    assert not any("--perturb-ulp" in run for run in trainer.trained), "decided before an envelope is made"


class Ending:
    """A trainer whose runs of the candidate, or of all, end without having trained."""

    def __init__(self, outcome: Outcome, at: int) -> None:
        self.outcome, self.at, self.calls = outcome, at, 0
        self.real = InProcessTrainer()

    def train(self, config: Path, overrides: Sequence[str], **options: Any) -> Attempt:
        self.calls += 1
        if self.calls >= self.at:
            return Attempt(self.outcome, None, "it went wrong", 1.0, None)
        return self.real.train(config, overrides, **options)


@pytest.mark.parametrize("outcome", ["crash", "hang", "out_of_memory", "refused"])
def test_a_candidate_that_does_not_train_fails_and_a_baseline_is_not_comparable(
    files: Files, outcome: Outcome
) -> None:
    candidate = files.variant("candidate", overlap={"bucket_size_mb": 5})
    broken = judge(files, candidate, "exact", Ending(outcome, at=1))
    assert (broken.verdict, "it went wrong" in broken.why) == ("not comparable", True)
    failed = judge(files, candidate, "exact", Ending(outcome, at=2))
    assert (failed.verdict, "candidate" in failed.why) == ("fail", True)


def test_an_interrupted_gate_keeps_what_was_finished(files: Files) -> None:
    candidate = files.variant("candidate", overlap={"bucket_size_mb": 5})
    with pytest.raises(KeyboardInterrupt):
        judge(files, candidate, "exact", Ending("interrupted", at=2))
    trainer = InProcessTrainer()
    assert judge(files, candidate, "exact", trainer).passed
    assert len(trainer.trained) == 1


@pytest.mark.long
def test_a_run_is_never_compared_with_itself(files: Files) -> None:
    baseline = files.variant("baseline")
    trainer = InProcessTrainer()
    for tier, runs in (("exact", 2), ("statistical", 6)):
        trainer.trained.clear()
        assert judge(files, baseline, tier, trainer).passed
        assert len(trainer.trained) == runs, "both sides were trained, although they are the same"


@pytest.mark.parametrize("verdict", ["not applicable", "leak"])
def test_a_first_pair_whose_probe_is_not_clean_ends_the_statistical_tier(
    files: Files, monkeypatch: pytest.MonkeyPatch, verdict: str
) -> None:
    clean = gate_runs.read_evidence

    def probed(run: Run, **options: Any) -> Evidence:
        found = clean(run, **options)
        return found if found.leak is None else replace(found, leak=Leak(verdict, "so it was"))

    monkeypatch.setattr(gate_runs, "read_evidence", probed)
    candidate = files.variant("candidate", precision={"params_dtype": "bf16"})
    trainer = InProcessTrainer()
    found = judge(files, candidate, "statistical", trainer)
    assert found.verdict == {"not applicable": "inconclusive", "leak": "not comparable"}[verdict]
    assert "so it was" in found.why
    assert len(trainer.trained) == 2


def make(tiny: Tiny, *overrides: str, parent: Run | None = None, probe: bool = False) -> Run:
    """A run as a user makes it: 20 steps, started by itself."""
    loaded = load_config(str(tiny.file), ["training.train_iters=20", "run.deterministic=true", *overrides])
    origin = RunOrigin(probe=probe)
    if parent is not None:
        origin = RunOrigin(parent.id, change_between(parent.config(), loaded.config), probe)
    corpus = ensure_corpus(loaded.config.data, loaded.config.model)
    path = create_run(loaded, corpus, world_size=1, argv=["test"], origin=origin)
    with deterministic(enabled=True):
        work(path, Ranks())
    return open_run(path)


def test_without_probes_the_answer_is_inconclusive_and_names_the_commands(tiny: Tiny) -> None:
    first, second = make(tiny), make(tiny, "data.num_workers=1")
    found = gate_of_runs(first, second)
    assert (found.tier, found.verdict) == ("exact", "inconclusive")
    assert set(found.numbers["missing"]) == {"baseline", "candidate"}
    command = found.numbers["missing"]["candidate"]
    assert command.startswith(f"drivetrain train {second.path / 'config.toml'} ")
    assert command.endswith(" --probe")
    assert command in found.why
    assert found.numbers["change"] == {"data.num_workers": 1}


def of_commit(run: Run, commit: str) -> Run:
    """The run, as if it had been made by the code of another commit."""
    manifest = json.loads((run.path / "run.json").read_bytes())
    manifest["provenance"]["git"]["commit"] = commit
    (run.path / "run.json").write_text(json.dumps(manifest))
    return open_run(run.path)


def test_runs_of_different_code_get_no_companions_and_no_pass(tiny: Tiny) -> None:
    plain = "run.deterministic=false"
    first, second = of_commit(make(tiny, plain), "aaaa"), of_commit(make(tiny, plain), "bbbb")
    trainer = InProcessTrainer()
    for asked in (None, trainer):
        found = gate_of_runs(first, second, trainer=asked)
        assert found.verdict == "inconclusive"
        assert "runs are missing that cannot be made: baseline, candidate" in found.why
        assert "different code (commit aaaa and bbbb)" in found.why
        assert "--run-missing" not in found.why
        assert "drivetrain train" not in found.why
        assert "missing" not in found.numbers
    assert trainer.trained == []


@pytest.mark.long
def test_companions_of_other_code_than_the_runs_are_not_taken(tiny: Tiny) -> None:
    first, second = make(tiny), make(tiny, "data.num_workers=1")
    for overrides in ((), ("data.num_workers=1",)):
        of_commit(make(tiny, *overrides, probe=True), "aaaa")
    assert gate_of_runs(first, second).verdict == "inconclusive"
    for run in (first, second):
        of_commit(run, "aaaa")
    assert gate_of_runs(open_run(first.path), open_run(second.path)).verdict == "pass"


def test_runs_of_one_other_code_name_the_commands_and_are_not_made_by_this_code(tiny: Tiny) -> None:
    first, second = (of_commit(make(tiny, f"data.num_workers={count}"), "aaaa") for count in (0, 1))
    trainer = InProcessTrainer()
    found = gate_of_runs(first, second, trainer=trainer)
    assert (found.verdict, trainer.trained) == ("inconclusive", [])
    assert "the runs are of other code than this (commit aaaa and " in found.why
    assert "with theirs: baseline: drivetrain train" in found.why
    assert "--run-missing" not in found.why


def test_deterministic_probed_runs_of_different_code_are_compared_as_they_are(tiny: Tiny) -> None:
    first, second = (of_commit(make(tiny, probe=True), commit) for commit in ("aaaa", "bbbb"))
    assert gate_of_runs(first, second, trainer=InProcessTrainer()).verdict == "pass"


@pytest.mark.parametrize(
    ("tier", "overrides"),
    [("exact", ()), ("exact", ("run.deterministic=false",)), ("round-off", ())],
)
def test_runs_too_short_to_decide_get_no_companions(
    tiny: Tiny, tier: Tier, overrides: tuple[str, ...]
) -> None:
    short = ("training.train_iters=10", *overrides)
    first, second = make(tiny, *short), make(tiny, *short, "data.num_workers=1")
    trainer = InProcessTrainer()
    found = gate_of_runs(first, second, tier=tier, trainer=trainer)
    assert (found.verdict, trainer.trained) == ("inconclusive", [])
    assert "the runs have 10 steps in common, at least 20 are needed" in found.why
    assert "drivetrain train" not in found.why


def test_missing_runs_are_made_when_asked_for(tiny: Tiny) -> None:
    first, second = make(tiny), make(tiny, "data.num_workers=1")
    trainer = InProcessTrainer()
    assert gate_of_runs(first, second, trainer=trainer).verdict == "pass"
    assert len(trainer.trained) == 2
    assert gate_of_runs(first, second).verdict == "pass", "they lie beside the others now"


def test_probed_runs_need_nothing_more(tiny: Tiny) -> None:
    first = make(tiny, probe=True)
    second = make(tiny, "data.num_workers=1", parent=first, probe=True)
    found = gate_of_runs(first, second)
    assert found.verdict == "pass", found.why
    assert "data_workers" in found.numbers["tier_rule"]


def test_equal_configurations_are_two_runs(tiny: Tiny) -> None:
    first, second = make(tiny), make(tiny, probe=True)
    found = gate_of_runs(first, second)
    assert found.verdict == "inconclusive"
    assert set(found.numbers["missing"]) == {"baseline"}, "the candidate's probe is not the baseline's"
    assert gate_of_runs(make(tiny, probe=True), second).verdict == "pass"


def test_a_leaf_without_entry_claims_to_be_exact(tiny: Tiny) -> None:
    first, second = make(tiny), make(tiny, "optimizer.lr=1e-3")
    found = gate_of_runs(first, second)
    assert (found.tier, found.verdict) == ("exact", "fail"), "that needs no probe"
    assert "--tier" in found.numbers["tier_rule"]
    declared = gate_of_runs(first, second, tier="statistical")
    assert (declared.tier, declared.verdict) == ("statistical", "inconclusive")
    assert any("run.seed=1235" in command for command in declared.numbers["missing"].values())


def test_several_leaves_are_named_unless_a_tier_is_declared(tiny: Tiny) -> None:
    first = make(tiny, probe=True)
    second = make(tiny, "data.num_workers=1", "optimizer.fused=false", probe=True)
    found = gate_of_runs(first, second)
    assert (found.tier, found.verdict) == (None, "not comparable")
    assert "data.num_workers, optimizer.fused" in found.why
    bundle = gate_of_runs(first, second, tier="round-off")
    assert (bundle.tier, bundle.verdict) == ("round-off", "inconclusive")
    assert set(bundle.numbers["missing"]) == {f"perturbed baseline {number}" for number in (1, 2, 3)}


def test_a_child_that_differs_in_more_than_it_declares_is_refused(tiny: Tiny) -> None:
    first = make(tiny)
    second = make(tiny, "data.num_workers=1", parent=first)
    manifest = json.loads((second.path / "run.json").read_bytes())
    manifest["change"] = {"optimizer.fused": False}
    (second.path / "run.json").write_text(json.dumps(manifest))
    found = gate_of_runs(first, open_run(second.path))
    assert found.verdict == "not comparable"
    assert "data.num_workers, optimizer.fused" in found.why


def test_a_run_that_skipped_steps_in_its_log_is_refused(tiny: Tiny) -> None:
    first, second = make(tiny), make(tiny, "monitor.log_interval=5")
    found = gate_of_runs(first, second)
    assert found.verdict == "not comparable"
    assert "monitor.log_interval=1" in found.why


@pytest.mark.parametrize(
    "wrong",
    [
        {"exact_steps": 19},
        {"roundoff_steps": 5},
        {"statistical_steps": 4},
        {"perturbations": 2},
        {"eval_iters": 0},
        {"looks": ()},
        {"looks": (1, 3)},
        {"looks": (5, 3)},
    ],
)
def test_settings_that_can_decide_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(DrivetrainError, match=next(iter(wrong))):
        GateSettings(**wrong)


def test_tiers_of_changes() -> None:
    assert tier_of_change({})[0] == "exact"
    assert tier_of_change({"data.num_workers": 2})[0] == "exact"
    assert tier_of_change({"fusion.compile": True})[0] == "round-off"
    assert tier_of_change({"precision.params_dtype": "bf16"})[0] == "statistical"
    assert tier_of_change({"training.global_batch_size": 64})[0] == "exact"
    with pytest.raises(RunError, match="several leaves"):
        tier_of_change({"fusion.compile": True, "training.global_batch_size": 64})


def test_evidence_says_how_a_run_ended_and_what_it_ran_on(tiny: Tiny) -> None:
    run = make(tiny, probe=True)
    found = read_evidence(run)
    assert (found.end, len(found.points), found.deterministic) == ("finished", 20, True)
    assert found.points[-1].tokens == 20 * 8 * 32
    assert found.held_out is not None
    assert found.environment.keys() == {
        "torch", "python", "drivetrain", "device", "threads", "world size", "dtype"
    }  # fmt: skip
    assert "dtype" not in read_evidence(run, changed=["precision.params_dtype"]).environment
    assert found.gradients is not None
    assert all(np.isfinite(value).all() for value in found.gradients().values())
    events = run.path / "events.jsonl"
    events.write_bytes(
        b"".join(line for line in events.read_bytes().splitlines(True) if b'"end"' not in line)
    )
    assert read_evidence(open_run(run.path)).end == "unfinished"


def test_a_damaged_gradients_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "gradients.safetensors"
    for content in (b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{]", b"\x02\0\0\0\0\0\0\0[]"):
        path.write_bytes(content)
        with pytest.raises(RunError, match=r"gradients\.safetensors is damaged"):
            read_gradients(path)
