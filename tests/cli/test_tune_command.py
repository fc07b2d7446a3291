"""``drivetrain tune``: what it refuses, what it shows, and the whole loop on the tiny model."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.tunes import list_tunes, open_tune
from drivetrain.cli.tune_command import seconds_of
from drivetrain.config import load_config
from drivetrain.errors import DrivetrainError
from runs_on_the_spot import Tiny

SLOW = """
import time
import torch.utils.data

def slow(ids):
    # Slow in the training process alone: workers take the whole of it away, on any machine.
    if torch.utils.data.get_worker_info() is None:
        time.sleep(0.05)
    return ids

"""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("90", 90), ("20m", 1200), ("1h30m", 5400), ("0.5h", 1800), ("1m30s", 90)],
)
def test_a_budget_is_a_duration(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5m", "5x", "m", "1m1h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(DrivetrainError, match="is no duration"):
        seconds_of(text)


def test_a_budget_that_starts_no_five_processes_is_refused_at_once() -> None:
    with pytest.raises(DrivetrainError, match="too small for one trial"):
        seconds_of("3s")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "what is to be tuned"),
        (["--replay", "x"], "no tune 'x'"),
        (["llama-2m", "--replay", "x"], "runs nothing"),
        (["--replay", "x", "--budget", "1h", "--only", "compile"], "drop --budget, --only"),
        (
            ["--replay", "x", "--no-leave-one-out", "--gate-steps", "20", "--short-gates"],
            "drop --no-leave-one-out, --gate-steps, --short-gates",
        ),
        (
            [
                "--replay",
                "x",
                "--trial-steps",
                "4",
                "--trial-looks",
                "1",
                "--knob-trials",
                "0",
                "--nproc",
                "1",
            ],
            "drop --trial-steps, --trial-looks, --knob-trials, --nproc",
        ),
        (["llama-2m", "--only", "warp_drive"], "no optimisation is called 'warp_drive'"),
        (["llama-2m", "--short-gates", "--gate-steps", "50"], "give one of them"),
        (["llama-2m", "--goal", "memry"], "did you mean memory"),
        (["llama-2m", "--slower-at-most", "5%"], "belongs to --goal memory"),
        (["llama-2m", "--goal", "memory", "--slower-at-most", "5"], "nearest: 5%"),
        (["--replay", "x", "--dry-run", "--goal", "cost"], "drop --goal, --dry-run"),
        (["llama-2m", "--trial-looks", "2,1"], "increasing whole numbers from 1"),
        (["llama-2m", "--trial-looks", "1,,2"], "as in 1,2,4"),
        (["llama-2m", "--trial-looks", "0,2"], "from 1 to 100"),
        (["llama-2m", "training.global_batch_size=17"], "global_batch_size"),
        (["llama-3m"], "did you mean llama-2m"),
        (
            [
                "llama-2m",
                "checkpoint.initial_load_path=step-00000002",
                "checkpoint.initial_load_model_only=false",
            ],
            "short runs that are compared begin at the first step",
        ),
    ],
)
def test_bad_input_is_refused_before_a_folder_is_made(tiny: Tiny, arguments: list[str], message: str) -> None:
    done = tiny.run("tune", *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tiny.folder / "tunes").exists()


def slow(tiny: Tiny) -> list[str]:
    """A configuration whose loader is slow, and that is on everything else already."""
    (tiny.folder / "slow_transform.py").write_text(SLOW)
    text = tiny.file.read_text().replace("train_iters = 8", "train_iters = 600")
    tiny.file.write_text(text)
    return [
        "tune",
        str(tiny.file),
        "data.transform=slow_transform:slow",
        "--only",
        "data_workers",
        "--knob-trials",
        "0",
    ]


def documents(corpus: Path, folder: Path) -> Path:
    """A corpus of many small documents, so that a step needs several of them."""
    from drivetrain.engine.data.prepare import prepare

    words = Path(os.__file__).read_text().split()
    texts = folder / "texts"
    texts.mkdir()
    for number in range(1500):
        (texts / f"{number}.txt").write_text(" ".join(words[number : number + 40]))
    prepare([texts], folder / "small", vocab_size=384)
    return folder / "small"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_whole_loop_keeps_the_workers_and_can_be_shown_again(tiny: Tiny, tiny_corpus: Path) -> None:
    command = [*slow(tiny), f"data.data_path={documents(tiny_corpus, tiny.folder)}"]
    done = tiny.run(*command, "--budget", "20m", "--trial-steps", "6", "--json", timeout=1500)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    (step,) = [step for step in document["steps"] if step["change"] == {"data.num_workers": 1}]
    assert step["kept"]
    assert step["measured"]["low"] > 1
    assert step["gate"] == {**step["gate"], "tier": "exact", "verdict": "pass"}
    assert document["final_gate"]["verdict"] == "pass"
    assert document["saved"]["seconds_per_step"] > 0
    (path,) = list_tunes(tiny.folder / "tunes")
    final = path / document["final"]["config"]
    assert load_config(str(final)).config.data.num_workers >= 1
    assert list((path / "runs").glob("*/checkpoints")) == []
    shown = tiny.run("tune", "--replay", path.name)
    assert shown.returncode == 0, shown.stderr
    assert "data.num_workers=1" in shown.stdout
    assert "kept" in shown.stdout
    assert "device-hours" in shown.stdout
    again = tiny.run("tune", path.name)
    assert again.returncode == 2
    assert "is finished" in again.stderr
    trained = tiny.train(options=[])
    assert trained["status"] == "finished"


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
def test_killed_five_times_the_ladder_ends_and_repeats_no_finished_piece(
    tiny: Tiny, tiny_corpus: Path
) -> None:
    first = [*slow(tiny), f"data.data_path={documents(tiny_corpus, tiny.folder)}", "--budget", "30m"]
    command = [*first, "--trial-steps", "6"]
    chance = random.Random(0)
    seen: list[str] = []
    for _ in range(5):
        tuner = tiny.start(*command)
        time.sleep(chance.uniform(4, 20))
        tuner.send_signal(signal.SIGKILL)
        tuner.communicate()
        folders = list_tunes(tiny.folder / "tunes")
        if not folders:
            continue
        pieces = [entry["piece"] for entry in open_tune(folders[0]).document["pieces"]]
        assert pieces[: len(seen)] == seen, "a finished piece stays as it is"
        seen = pieces
        command = ["tune", folders[0].name]
        if open_tune(folders[0]).document["status"] == "finished":
            break
    done = tiny.run(*command, "--json", timeout=1500)
    assert done.returncode == 0, done.stderr
    document = open_tune(list_tunes(tiny.folder / "tunes")[0]).document
    keys = [entry["piece"] for entry in document["pieces"]]
    assert keys[: len(seen)] == seen
    assert len(set(keys)) == len(keys)
    assert [step["kept"] for step in document["steps"] if step["change"] == {"data.num_workers": 1}] == [True]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="signals as on Linux")
def test_ctrl_c_saves_ends_the_run_and_exits_with_130(tiny: Tiny, tiny_corpus: Path) -> None:
    tuner: subprocess.Popen[bytes] = tiny.start(*slow(tiny), "--budget", "20m")
    while not list_tunes(tiny.folder / "tunes") or not list(
        (list_tunes(tiny.folder / "tunes")[0] / "runs").glob("*/heartbeat.json")
    ):
        time.sleep(0.2)
        assert tuner.poll() is None
    tuner.send_signal(signal.SIGINT)
    _, errors = tuner.communicate(timeout=300)
    assert tuner.returncode == 130, errors.decode()
    (path,) = list_tunes(tiny.folder / "tunes")
    assert open_tune(path).status() == "interrupted"
    assert path.name in str(open_tune(path).document["reason"])
