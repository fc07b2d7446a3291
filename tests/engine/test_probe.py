"""A probed run is an unprobed one to the bit and leaves what the gate compares; options of a new run."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.archive.origin import RunOrigin
from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RunWriter
from drivetrain.cli.beginning import Beginning
from drivetrain.cli.train_command import run_train
from drivetrain.config import load_config, to_toml
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.model.batch import check_batch, documents_of
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.probe import probe_batch, probe_leak
from drivetrain.errors import DrivetrainError
from drivetrain.tune.gate_files import read_gradients
from runs_on_the_spot import Tiny, losses_of


def test_the_batch_holds_documents_by_the_corpus_s_own_index(tiny: Tiny) -> None:
    config = load_config(str(tiny.file), ["training.micro_batch_size=8"]).config
    corpus = ensure_corpus(config.data, config.model)
    found = probe_batch(config, corpus)
    check_batch(found.batch, config.model.vocab_size)
    assert found.documents.shape == (8, 32)
    assert found.documents.max() >= 1
    borders = {first for first, _ in documents_of(found.batch)}
    changes = np.flatnonzero(np.diff(found.documents.ravel()) != 0) + 1
    assert set(changes.tolist()) <= borders


def test_a_batch_is_constructed_where_no_sequence_has_two_documents(tiny: Tiny) -> None:
    config = load_config(str(tiny.file), ["model.seq_length=4"]).config
    corpus = ensure_corpus(config.data, config.model)
    found = probe_batch(config, corpus)
    assert found.constructed
    check_batch(found.batch, config.model.vocab_size)
    assert found.documents.tolist() == [[0, 0, 1, 1]] * 4
    made = Decoder(config.model, torch.float32)
    initialize(made, 0)
    leak = probe_leak(made, found, documents_isolated=True)
    assert leak.verdict == "clean"
    assert "two halves" in probe_leak(made, found, documents_isolated=True).why


@pytest.mark.parametrize("more", [(), ("data.num_workers=1",)])
def test_a_probed_run_equals_an_unprobed_one_to_the_bit(tiny: Tiny, more: tuple[str, ...]) -> None:
    settings = ["model.hidden_dropout=0.1", "training.train_iters=6", *more]
    plain = open_run(tiny.train(*settings)["run"])
    probed = open_run(tiny.train(*settings, options=["--probe"])["run"])
    assert losses_of(probed) == losses_of(plain)
    assert not (plain.path / "probe").exists()
    assert (plain.manifest["probe"], probed.manifest["probe"]) == (False, True)
    leak = json.loads((probed.path / "probe" / "leak.json").read_bytes())
    assert leak["verdict"] == "clean"
    assert leak.keys() >= {"schema", "document_leak", "future_leak", "tolerance", "documents_isolated", "why"}


def test_the_gradients_are_those_of_the_whole_batch_and_not_clipped(tiny: Tiny) -> None:
    settings = ["training.train_iters=2", "training.clip_grad=0.01"]
    one = open_run(tiny.train(*settings, options=["--probe"])["run"])
    two = tiny.train_on_ranks(2, *settings, origin=RunOrigin(probe=True))
    gradients, of_two = (read_gradients(run.path / "probe" / "gradients.safetensors") for run in (one, two))
    norm = float(np.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in gradients.values())))
    assert norm == pytest.approx(one.metrics()[0]["train/grad_norm"], rel=1e-5)
    assert gradients.keys() == of_two.keys()
    for name, value in gradients.items():
        assert value.dtype == np.float32
        difference = np.linalg.norm(of_two[name] - value) / np.linalg.norm(value)
        assert difference < 1e-5, name
    assert json.loads((two.path / "probe" / "leak.json").read_bytes())["verdict"] == "clean"


def test_a_perturbed_run_has_other_bits_and_says_so(tiny: Tiny) -> None:
    settings = ["training.train_iters=3", "precision.params_dtype=bf16"]
    plain = open_run(tiny.train(*settings)["run"])
    moved = open_run(tiny.train(*settings, options=["--perturb-ulp", "4"])["run"])
    again = open_run(tiny.train(*settings, options=["--perturb-ulp", "4"])["run"])
    assert losses_of(moved) == losses_of(again)
    assert losses_of(moved) != losses_of(plain)
    assert abs(losses_of(moved)[1] - losses_of(plain)[1]) < 0.05
    assert (moved.manifest["perturb_ulp"], plain.manifest["perturb_ulp"]) == (4, None)
    start = next(event for event in moved.events() if event["kind"] == "start")
    assert start["perturb_ulp"] == 4


def test_a_continued_run_is_not_perturbed_again(tiny: Tiny) -> None:
    settings = ["checkpoint.save_interval=3", "training.train_iters=6", "checkpoint.keep_latest_k=4"]
    whole = open_run(tiny.train(*settings, options=["--perturb-ulp", "4", "--probe"])["run"])
    expected = losses_of(whole)
    events = whole.path / "events.jsonl"
    events.write_bytes(
        b"".join(line for line in events.read_bytes().splitlines(True) if b'"end"' not in line)
    )
    shutil.rmtree(whole.path / "checkpoints" / "step-00000006")
    shutil.rmtree(whole.path / "probe")
    done = tiny.run("train", str(whole.path))
    assert done.returncode == 0, done.stderr
    assert losses_of(open_run(whole.path)) == expected
    assert not (whole.path / "probe").exists(), "the first step is long over"


def test_a_child_names_its_parent_and_the_change(tiny: Tiny) -> None:
    parent = open_run(tiny.train("training.train_iters=2")["run"])
    child = open_run(
        tiny.train(
            "training.train_iters=2", "data.num_workers=1", "run.name=child", options=["--parent", parent.id]
        )["run"]
    )
    assert child.manifest["parent"] == parent.id
    assert child.manifest["change"] == {"data.num_workers": 1}
    assert (parent.manifest["parent"], parent.manifest["change"]) == (None, None)


@pytest.mark.parametrize("option", [("--probe",), ("--perturb-ulp", "1"), ("--parent", "latest")])
@pytest.mark.parametrize("other", ["--dry-run", "--overfit-batch"])
def test_options_of_a_new_run_are_refused_where_there_is_none(
    tiny: Tiny, option: tuple[str, ...], other: str
) -> None:
    beginning = Beginning(
        probe=option[0] == "--probe",
        perturb_ulp=1 if option[0] == "--perturb-ulp" else None,
        parent="latest" if option[0] == "--parent" else None,
    )
    with pytest.raises(DrivetrainError, match=f"{option[0]} belongs to a new run, and {other} makes none"):
        run_train(
            str(tiny.file),
            [],
            num_processes=None,
            dry=other == "--dry-run",
            overfit=other == "--overfit-batch",
            as_json=False,
            beginning=beginning,
        )


def test_a_run_to_continue_takes_no_option_of_a_new_one(tiny: Tiny) -> None:
    manifest: dict[str, Any] = {"config_hash": "", "layout": {"world_size": 1}, "provenance": {}, "seed": 1}
    manifest |= {"devices": {}, "dataset": {}}
    toml = to_toml(load_config(str(tiny.file)).config)
    with RunWriter.create(tiny.runs, "begun", config_toml=toml, manifest=manifest) as writer:
        path = Path(writer.path)
    with pytest.raises(DrivetrainError, match="--probe belongs to the start of a run"):
        run_train(
            str(path),
            [],
            num_processes=None,
            dry=False,
            overfit=False,
            as_json=False,
            beginning=Beginning(probe=True),
        )


def test_an_unknown_parent_leaves_no_run_behind(tiny: Tiny) -> None:
    done = tiny.run("train", str(tiny.file), "--parent", "nobody")
    assert done.returncode == 2
    assert "nobody" in done.stderr
    assert not tiny.runs.exists()
