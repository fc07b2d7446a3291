"""A slow transform on purpose: the account puts its time into data.loader, the run and the diagnosis name it, and the
move of the catalogue takes it away without changing a bit of the training."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.reader import Run, open_run
from drivetrain.catalogue import catalogue
from drivetrain.cli.account_sources import Figures, make_account
from drivetrain.config import LaunchFacts, load_config
from drivetrain.tune.candidates import survey
from runs_on_the_spot import Tiny, losses_of

# Whoever writes such a pattern means well: it backs up from every number to the end of the document.
SLOW = r"""
import re

PATTERN = re.compile(r"(\d+ )+x")


def drop_marked(ids):
    text = " ".join(map(str, ids.tolist())) + " "
    for _ in range(6):
        assert PATTERN.sub("", text) == text
    return ids


def keep(ids):
    return ids
"""
TRANSFORMS = "regex_transform:keep,regex_transform:drop_marked"
SETTINGS = [
    f"data.transform={TRANSFORMS}",
    "training.train_iters=30",
    "training.eval_iters=0",
    "profiler.profile=true",
    "profiler.profile_step_start=20",
    "profiler.profile_step_end=24",
    "fusion.compile=false",
]


def many_documents(folder: Path) -> Path:
    """A corpus of 1,500 documents of some hundred tokens: each step needs a few that no step before it had."""
    from drivetrain.engine.data.prepare import prepare

    words = Path(os.__file__).read_text().split()
    texts = folder / "texts"
    texts.mkdir()
    for number in range(1500):
        (texts / f"{number}.txt").write_text(" ".join(words[number : number + 40]))
    prepare([texts], folder / "small", vocab_size=384)
    return folder / "small"


def loader_share(run: Run) -> float:
    account, _ = make_account([str(run.path)], step_window="device", figures=Figures(), rules=None)
    steps = [step.window for rank in account.ranks for step in rank.steady_steps]
    return sum(step.group_ns("data.loader") for step in steps) / sum(step.window_ns for step in steps)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_slow_transform_is_placed_named_and_removed(tiny: Tiny) -> None:
    (tiny.folder / "regex_transform.py").write_text(SLOW)
    prefix = many_documents(tiny.folder)
    slow = tiny.train(*SETTINGS, f"data.data_path={prefix}")
    run = open_run(slow["run"])
    assert loader_share(run) >= 0.25

    named = [finding for finding in slow["findings"] if "waiting for batches" in finding]
    assert len(named) == 1
    assert "is regex_transform:drop_marked of data.transform: " in named[0]
    warnings = [event["message"] for event in run.events() if event["kind"] == "warning"]
    assert any("regex_transform:drop_marked of data.transform" in message for message in warnings)
    (end,) = [event for event in run.events() if event["kind"] == "data" and event["when"] == "end"]
    assert end["slowest"] == "regex_transform:drop_marked"
    assert {"regex_transform:keep", "read", "collate"} < end["operations"].keys()
    transformed, read = (
        sum(line[f"data/{what}_s"] for line in run.metrics()) for what in ("transform", "read")
    )
    assert transformed > read

    found = tiny.run("diagnose", str(run.path), "--json")
    assert found.returncode == 0, found.stderr
    diagnosis: dict[str, Any] = json.loads(found.stdout)
    (finding,) = [one for one in diagnosis["findings"] if one["rule"] == "data_operations"]
    assert finding["subject"] == "regex_transform:drop_marked"
    assert finding["part_of"] == "data.loader"
    remedies = {remedy["optimisation"]: remedy["change"] for remedy in finding["remedies"]}
    assert {"bake_transforms", "data_workers", "prefetch", "sample_cache"} <= remedies.keys()

    config = load_config(str(run.path)).config
    classes = {"data.loader": 1.0}
    candidates = survey(classes, config, LaunchFacts(), entries=catalogue()).candidates
    (move,) = [one.change for one in candidates if one.name == "bake_transforms"]
    assert move is not None
    assert move.leaves == remedies["bake_transforms"]

    fast = tiny.train(*SETTINGS, *(f"{leaf}={value}" for leaf, value in move.leaves.items()))
    after = open_run(fast["run"])
    assert loader_share(after) < loader_share(run) / 2
    assert not [finding for finding in fast["findings"] if "drop_marked" in finding]
    assert losses_of(after) == losses_of(run), "the same training, to the bit"
    assert after.manifest["dataset"]["identity"] == run.manifest["dataset"]["identity"]
    (record,) = [one for one in fast["optimisations"] if one["name"] == "bake_transforms"]
    assert (record["requested"], record["active"], record["evidence"]) == (True, True, "shown")
