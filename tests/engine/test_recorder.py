"""What becomes of a step's figures: a batch without loss says nothing, neither good nor bad."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.archive.reader import Run
from drivetrain.archive.writer import RunWriter
from drivetrain.config import load_config
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks
from drivetrain.engine.progress import Progress
from drivetrain.engine.recorder import Recorder
from drivetrain.engine.step import StepFigures

FIGURES = StepFigures(
    loss_sum=torch.tensor(60.0),
    grad_norm=torch.tensor(1.5),
    clip_coefficient=torch.tensor(1.0),
    valid_tokens=20,
    tokens=32,
    sum_squared_lengths=1024,
    stop_votes=0,
    learning_rate=1e-3,
    data_wait_s=0.0,
    started=0.0,
    exposed_wait=None,
)
NO_LOSS = replace(FIGURES, loss_sum=torch.tensor(0.0), grad_norm=torch.tensor(0.0), valid_tokens=0)


@pytest.fixture
def recorder(tmp_path: Path) -> Any:
    config = load_config("llama-2m").config
    manifest = {"config_hash": "", "seed": 0, "layout": {}, "provenance": {}, "devices": {}, "dataset": {}}
    with RunWriter.create(tmp_path, "one", config_toml="", manifest=manifest) as writer:
        writer.open_segment(1)
        recorder = Recorder(
            config, ProcessGroup(Ranks()), torch.device("cpu"), peak=None, writer=writer, console=None
        )
        yield recorder, writer.path


def record(recorder: Recorder, progress: Progress, figures: StepFigures) -> None:
    progress.step += 1
    recorder.submit(replace(figures, started=time.perf_counter()), progress, ())
    recorder.close_step()
    recorder.flush(progress)


def lines(path: Path) -> list[dict[str, Any]]:
    return Run(path, {}).metrics()


def test_a_batch_without_a_token_that_carries_loss_has_no_loss(recorder: tuple[Recorder, Path]) -> None:
    made, path = recorder
    progress = Progress()
    for figures in (FIGURES, NO_LOSS, FIGURES):
        record(made, progress, figures)
    assert [line["train/loss"] for line in lines(path)] == [3.0, None, 3.0]
    assert [line["train/loss_ema"] for line in lines(path)] == pytest.approx([3.0, None, 3.0])
    assert made.diverged_at is None
    assert made.last_loss == 3.0


def test_the_first_steps_are_tagged_as_warm_up(recorder: tuple[Recorder, Path]) -> None:
    made, path = recorder
    progress = Progress()
    for _ in range(4):
        record(made, progress, FIGURES)
    assert [line["tags"] for line in lines(path)] == [["warmup"], ["warmup"], [], []]


def test_the_loss_of_the_last_batch_that_had_one_is_the_final_loss(recorder: tuple[Recorder, Path]) -> None:
    made, _ = recorder
    record(made, Progress(), NO_LOSS)
    assert made.last_loss is None
    record(made, Progress(step=1), FIGURES)
    record(made, Progress(step=2), NO_LOSS)
    assert made.last_loss == 3.0


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (replace(FIGURES, loss_sum=torch.tensor(float("nan"))), "loss"),
        (replace(NO_LOSS, grad_norm=torch.tensor(float("inf"))), "gradient norm"),
    ],
)
def test_a_number_that_is_not_finite_is_a_divergence(
    recorder: tuple[Recorder, Path], bad: StepFigures, what: str
) -> None:
    made, _ = recorder
    record(made, Progress(), bad)
    assert (made.diverged_at, made.diverged_in) == (1, what)


def test_bytes_of_collectives_are_means_over_the_steps_since_the_last_record(
    recorder: tuple[Recorder, Path],
) -> None:
    made, path = recorder
    made._config = load_config("llama-2m", ["monitor.log_interval=2"]).config
    progress = Progress()
    for tensor, pipeline in ((100, 6), (300, 0), (100, 0), (100, 0)):
        record(made, progress, replace(FIGURES, communicated={"tp": tensor, "pp": pipeline}))
    assert [line["comm/tp_bytes"] for line in lines(path)] == [200.0, 100.0]
    assert [line["comm/pp_bytes"] for line in lines(path)] == [3.0, 0.0]
    assert made.communicated_per_step("tp") == 150.0
    assert made.communicated_per_step("dp") == 0.0


def test_a_step_without_collectives_has_no_bytes_of_them(recorder: tuple[Recorder, Path]) -> None:
    made, path = recorder
    record(made, Progress(), FIGURES)
    assert not [key for line in lines(path) for key in line if key.startswith("comm/")]
