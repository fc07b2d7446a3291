"""``train --resume``: a job that starts again goes on with its run, and never with another's."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RunWriter
from drivetrain.cli.beginning import Beginning
from drivetrain.cli.resume import finished_summary, run_of_this_name
from drivetrain.cli.train_command import run_train
from drivetrain.config import load_config, to_toml
from drivetrain.errors import DrivetrainError, RunError
from runs_on_the_spot import Tiny, losses_of

SETTINGS = ["training.train_iters=4", "training.eval_iters=0", "run.name=mine"]


def interrupted(tiny: Tiny, *overrides: str) -> Path:
    """A run of that name that has ended before its end."""
    path = Path(open_run(tiny.train(*SETTINGS, "checkpoint.save_interval=2", *overrides)["run"]).path)
    text = (path / "events.jsonl").read_text()
    (path / "events.jsonl").write_text(text.replace('"status":"finished"', '"status":"interrupted"'))
    assert open_run(path).status() == "interrupted"
    return path


def made(tiny: Tiny, status: str, *overrides: str) -> Path:
    """A run of that name which has ended, with nothing trained."""
    loaded = load_config(str(tiny.file), [*SETTINGS, *overrides])
    keys = ("config_hash", "layout", "provenance", "devices", "dataset", "seed")
    manifest: dict[str, Any] = {key: {} for key in keys}
    with RunWriter.create(
        tiny.runs, str(loaded.config.run.name), config_toml=to_toml(loaded.config), manifest=manifest
    ) as writer:
        writer.event("end", status=status, reason="a test")
        return writer.path


def test_the_first_start_makes_the_run_and_the_next_finds_nothing_left(tiny: Tiny) -> None:
    arguments = ["train", str(tiny.file), *SETTINGS, "--resume", "--json"]
    first = tiny.run(*arguments)
    assert first.returncode == 0, first.stderr
    again = tiny.run(*arguments)
    assert again.returncode == 0, again.stderr
    assert f"nothing is left to do: {tiny.only_run().path} is finished" in again.stderr
    assert json.loads(again.stdout)["status"] == "finished"
    assert len(tiny.only_run().segments()) == 1


def test_a_run_that_has_not_finished_goes_on_from_its_checkpoint(tiny: Tiny) -> None:
    path = interrupted(tiny)
    newest = max((path / "checkpoints").iterdir())
    newest.rename(tiny.folder / newest.name)
    before = losses_of(open_run(path))
    done = tiny.run("train", str(tiny.file), *SETTINGS, "checkpoint.save_interval=2", "--resume")
    assert done.returncode == 0, done.stderr
    run = tiny.only_run()
    assert [event["step"] for event in run.events() if event["kind"] == "resume"] == [2]
    assert losses_of(run) == before
    assert run.status() == "finished"


@pytest.mark.long
def test_every_rank_of_torchrun_goes_on_with_the_one_run(tiny: Tiny) -> None:
    path = interrupted(tiny)
    newest = max((path / "checkpoints").iterdir())
    newest.rename(tiny.folder / newest.name)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "drivetrain", "train", str(tiny.file), *SETTINGS, "checkpoint.save_interval=2", "--resume"),
    ]

    def start() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, cwd=tiny.folder, capture_output=True, text=True, timeout=600, check=False
        )

    done = start()
    assert done.returncode == 0, done.stderr
    run = tiny.only_run()
    assert [event["step"] for event in run.events() if event["kind"] == "resume"] == [2]
    again = start()
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("nothing is left to do") == 1, "one rank says so"
    assert len(tiny.only_run().segments()) == 2


def test_a_run_of_that_name_with_another_configuration_is_left_alone(tiny: Tiny) -> None:
    made(tiny, "interrupted")
    loaded = load_config(str(tiny.file), [*SETTINGS, "optimizer.lr=0.5"])
    with pytest.raises(RunError) as refusal:
        run_of_this_name(loaded)
    assert "optimizer.lr is 0.003 there and 0.5 here" in str(refusal.value)
    assert "drivetrain train" in str(refusal.value)
    other = load_config(str(tiny.file), [*SETTINGS, "run.name=other", "optimizer.lr=0.5"])
    assert run_of_this_name(other) is None


def test_of_several_runs_the_newest_goes_on_and_what_cannot_be_read_is_told(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tiny, "finished", "run.name=other")
    older = made(tiny, "interrupted")
    time.sleep(0.01)
    newest = made(tiny, "finished")
    loaded = load_config(str(tiny.file), SETTINGS)
    found = run_of_this_name(loaded)
    assert found is not None
    assert found.path == newest
    assert finished_summary(newest) == {}
    assert finished_summary(older) is None
    (newest / "run.json").write_text("{")
    found = run_of_this_name(loaded)
    assert found is not None
    assert found.path == older
    reason, passed_over = capsys.readouterr().err.splitlines()
    assert reason.startswith(f"note: {newest / 'run.json'} is damaged"), "which, and why"
    assert passed_over.startswith(f"note: --resume passes over {newest}, which has the name mine")
    assert passed_over.endswith(f"goes on with {older}")


def test_an_older_run_that_cannot_be_read_is_not_passed_over(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = made(tiny, "interrupted")
    older = newest.with_name(f"20200101-000000-{newest.name[16:]}")
    older.mkdir()
    (older / "run.json").write_text("{")
    found = run_of_this_name(load_config(str(tiny.file), SETTINGS))
    assert found is not None
    assert found.path == newest
    said = capsys.readouterr().err
    assert f"note: {older / 'run.json'} is damaged" in said
    assert "passes over" not in said


def test_without_a_name_or_with_a_run_or_an_option_for_new_runs_it_is_refused(tiny: Tiny) -> None:
    def refused(source: str, *overrides: str, **options: Any) -> str:
        settings = {"num_processes": None, "dry": False, "overfit": False, "as_json": False, "resume": True}
        with pytest.raises(DrivetrainError) as refusal:
            run_train(source, overrides, **{**settings, **options})
        return str(refusal.value)

    assert "run.name is not set" in refused(str(tiny.file))
    assert "--dry-run" in refused(str(tiny.file), *SETTINGS, dry=True)
    assert "--overfit-batch" in refused(str(tiny.file), *SETTINGS, overfit=True)
    assert "--probe" in refused(str(tiny.file), *SETTINGS, beginning=Beginning(probe=True))
    assert not tiny.runs.exists()
    path = made(tiny, "interrupted")
    assert "naming it continues it" in refused(str(path))


def test_a_run_of_that_name_that_cannot_be_read_is_not_begun_anew(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made(tiny, "interrupted")
    (path / "run.json").write_text('{"schema": ')
    loaded = load_config(str(tiny.file), SETTINGS)
    with pytest.raises(RunError, match=f"{path.name} has the name mine and cannot be read"):
        run_of_this_name(loaded)
    assert "run.json is damaged" in capsys.readouterr().err
    other = load_config(str(tiny.file), ["run.name=min"])
    assert run_of_this_name(other) is None, "it is no affair of another name"
