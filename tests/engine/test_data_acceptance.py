"""A corpus that changed under a run: refused, unless the run was told to go on with it."""

import json
import os
from pathlib import Path

import pytest

from drivetrain.archive.compare import compare_runs
from drivetrain.archive.reader import Run, open_run
from drivetrain.archive.writer import append_event
from drivetrain.config import load_config
from drivetrain.engine.creation import create_run
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.data.prepare import prepare
from drivetrain.engine.data_acceptance import accept_data
from drivetrain.errors import DataError, RunError
from runs_on_the_spot import Tiny


def write(tiny: Tiny, module: object, vocab_size: int = 300) -> Path:
    source = tiny.folder / "text.txt"
    source.write_text(Path(str(module.__file__)).read_text() * 3)  # type: ignore[attr-defined]
    prepare([source], tiny.folder / "own", vocab_size=vocab_size)
    return tiny.folder / "own"


@pytest.fixture
def changed(tiny: Tiny) -> Run:
    """A run that has not begun, whose corpus has changed since it was made."""
    prefix = write(tiny, os)
    loaded = load_config(str(tiny.file), [f"data.data_path={prefix}", "training.train_iters=2"])
    corpus = ensure_corpus(loaded.config.data, loaded.config.model)
    path = create_run(loaded, corpus, world_size=1, argv=["drivetrain"])
    write(tiny, json)
    append_event(path, "end", status="interrupted", reason="before the first step")
    return open_run(path)


def test_a_run_goes_on_with_changed_data_once_that_was_accepted(tiny: Tiny, changed: Run) -> None:
    refused = tiny.run("train", str(changed.path))
    assert refused.returncode == 2
    assert f"drivetrain data accept {changed.path}" in refused.stderr
    done = tiny.run("data", "accept", str(changed.path), "--json")
    assert done.returncode == 0, done.stderr
    accepted = json.loads(done.stdout)
    assert accepted["former"] == changed.manifest["dataset"]["fingerprint"]
    assert accepted["fingerprint"] == changed.data_fingerprint() != accepted["former"]
    went_on = tiny.run("train", str(changed.path))
    assert went_on.returncode == 0, went_on.stderr
    assert changed.status() == "finished"
    warnings = compare_runs([changed, changed]).warnings
    assert f"{changed.path.name} went on with other data than it was started with" in warnings


def test_the_former_files_are_refused_once_others_were_accepted(tiny: Tiny, changed: Run) -> None:
    accept_data(changed.path)
    with pytest.raises(RunError, match="there is nothing to accept"):
        accept_data(changed.path)
    write(tiny, os)
    former = changed.data_fingerprint()
    assert accept_data(changed.path)["former"] == former
    assert changed.data_fingerprint() == changed.manifest["dataset"]["fingerprint"]


def test_data_that_do_not_fit_the_model_are_not_accepted(tiny: Tiny, changed: Run) -> None:
    write(tiny, json, vocab_size=1000)
    with pytest.raises(DataError, match=r"outside model\.vocab_size"):
        accept_data(changed.path)
    assert changed.data_fingerprint() == changed.manifest["dataset"]["fingerprint"]
