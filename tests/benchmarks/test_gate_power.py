"""The benchmark of the gate: its harms do what they say and leave nothing behind, its claims count as they say."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.writer import RunWriter
from drivetrain.config import load_config, to_toml
from drivetrain.engine import loop
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.model import decoder
from drivetrain.engine.model.batch import Batch, check_batch
from drivetrain.engine.model.dropout import Dropout
from drivetrain.engine.step import Stepper
from drivetrain.errors import DrivetrainError
from gate_power import FULL, QUICK, Attempt, Session, claims_of
from harness.claims import wilson
from harness.gate_harms import HARMS, Harm
from harness.gate_trainer import Job, Runs
from runs_on_the_spot import Tiny

WRAPPED = [
    (loop, "learning_rate"),
    (decoder, "DocumentLayout"),
    (Dropout, "forward"),
    (Stepper, "backward"),
    (Stepper, "step"),
]


def test_there_are_forty_attempts_of_harm_and_forty_of_identical_code() -> None:
    assert (len(FULL.harms) * FULL.seeds, FULL.same_code) == (40, 40)
    assert set(QUICK.harms) <= set(HARMS)
    assert {harm.tier for harm in HARMS.values()} == {"exact", "round-off", "statistical"}


@pytest.mark.parametrize("name", HARMS)
def test_a_harm_is_there_for_its_run_only(name: str) -> None:
    before = [getattr(owner, attribute) for owner, attribute in WRAPPED]
    wrapping = HARMS[name].wrapping
    assert wrapping is not None
    with wrapping():
        pass
    assert [getattr(owner, attribute) for owner, attribute in WRAPPED] == before


def first_batches(tiny: Tiny, harm: Harm, *, harmed: bool, count: int = 12) -> list[Batch]:
    config = load_config(str(tiny.file), ["model.seq_length=256", "training.micro_batch_size=2"]).config
    corpus = ensure_corpus(config.data, config.model)
    job = harm.setting(Job("a", ()))
    job = harm.applied(job) if harmed else job
    with ExitStack() as stack:
        for wrapping in job.wrappings:
            stack.enter_context(wrapping())
        with BatchLoader(config, corpus, "train") as loader:
            return [next(loader) for _ in range(count)]


def test_padding_carries_loss_only_with_the_harm(tiny: Tiny) -> None:
    harm = HARMS["loss over padding"]
    sound, harmed = (first_batches(tiny, harm, harmed=is_harmed, count=1)[0] for is_harmed in (False, True))
    for batch in (sound, harmed):
        check_batch(batch, 384)
    assert not sound.loss_mask[:, -64:].any()
    assert harmed.loss_mask.all()
    assert sound.token_ids.equal(harmed.token_ids)


def test_labels_and_stale_data_differ_as_they_should(tiny: Tiny) -> None:
    plain = first_batches(tiny, Harm("exact"), harmed=False)
    shifted = first_batches(tiny, HARMS["labels shifted"], harmed=True, count=1)[0]
    assert shifted.labels[:, :-1].equal(plain[0].labels[:, 1:])
    stale = first_batches(tiny, HARMS["stale data order"], harmed=True)
    assert stale[9].token_ids.equal(plain[9].token_ids)
    assert stale[10].token_ids.equal(plain[9].token_ids)
    assert not plain[10].token_ids.equal(plain[9].token_ids)


def test_names_of_runs_tell_what_they_are() -> None:
    job = Job("roundoff-1", ())
    names = {job.name}
    for harm in HARMS.values():
        names |= {harm.setting(job).name, harm.applied(harm.setting(job)).name}
    assert len(names) == 1 + 8 + 2, "dropout and padding have a baseline of their own"


def test_the_interval_of_a_share() -> None:
    # Wilson's interval of 36 of 40, from the formula worked out by hand.
    low, high = wilson(36, 40)
    assert (low, high) == (pytest.approx(0.7695, abs=1e-3), pytest.approx(0.9604, abs=1e-3))
    assert wilson(40, 40)[1] == pytest.approx(1)


def test_claims_count_what_went_as_wanted(tmp_path: Path) -> None:
    session = Session(Runs(tmp_path), replace(FULL, pool=32))
    harm = [Attempt(name, number, "round-off", "fail", "") for name in HARMS for number in range(5)]
    harm[0] = replace(harm[0], verdict="pass")
    harm[1] = replace(harm[1], verdict="inconclusive")
    same = [Attempt("identical code", number, "statistical", "pass", "") for number in range(40)]
    session.attempts = [*harm, *same, Attempt("torch.compile", 1, "round-off", "fail", "")]
    rejected, passed, control = claims_of(session)
    assert rejected.ratio == pytest.approx(39 / 40 / 0.9)
    assert "1 pass" in rejected.note
    assert "1 inconclusive" in rejected.note
    assert passed.ratio == pytest.approx(1 / 0.9)
    assert (control.target, control.ratio) == (0.0, 0.0)


def test_what_could_not_be_compared_is_no_rejection(tmp_path: Path) -> None:
    session = Session(Runs(tmp_path), FULL)
    answers = ("fail", "suspicious", "inconclusive", "not comparable", "pass")
    name = next(iter(HARMS))
    session.attempts = [Attempt(name, 1, "round-off", answer, "") for answer in answers]
    (rejected,) = claims_of(session)
    assert rejected.ratio == pytest.approx(3 / 5 / 0.9)
    assert "1 not comparable" in rejected.note


def test_a_run_that_crashed_is_no_evidence(tmp_path: Path) -> None:
    crashed = write_run(tmp_path, "crashed", {"status": "failed"})
    write_run(tmp_path, "diverged", {"status": "diverged"})
    runs = Runs(tmp_path)
    with pytest.raises(DrivetrainError, match=f"the run crashed crashed: it ended; delete {crashed}"):
        runs.get(Job("crashed", ()))
    assert runs.get(Job("diverged", ())).end == "diverged"


def write_run(folder: Path, name: str, summary: dict[str, Any]) -> Path:
    """A run that failed, with whatever its summary says."""
    manifest: dict[str, Any] = {
        "config_hash": "0",
        "layout": {"world_size": 1},
        "provenance": {},
        "devices": {},
        "dataset": {},
        "seed": 1,
    }
    config = to_toml(load_config("llama-2m").config)
    with RunWriter.create(folder, name, config_toml=config, manifest=manifest) as writer:
        writer.open_segment(1)
        writer.write_summary(summary)
        writer.event("end", status="failed", reason="it ended")
        return writer.path
