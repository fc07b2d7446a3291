"""One step leaves its figures on the device, and nothing a run reads is unpickled."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.config import Layout, load_config
from drivetrain.engine.creation import create_run
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.step import Stepper
from drivetrain.engine.worker import work
from runs_on_the_spot import Tiny


class CountReads(TorchDispatchMode):
    """Counts what makes the host wait for the device: a tensor's value read as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def stepper_and_batches(tiny: Tiny) -> Iterator[tuple[Stepper, Iterator[Batch]]]:
    config = load_config(str(tiny.file)).config
    corpus = ensure_corpus(config.data, config.model)
    decoder = Decoder(config.model, torch.float32)
    initialize(decoder, 0)
    group = ProcessGroup(Ranks())
    mesh = Mesh.form(Layout(), 0)
    device = torch.device("cpu")
    stepper = Stepper(
        decoder=decoder,
        sync=gradient_sync(decoder, mesh, Traffic(), zero_stage=0),
        optimizer=build_optimizer(decoder, config.optimizer),
        group=group,
        mesh=mesh,
        device=device,
        num_microbatches=2,
        max_norm=1.0,
        pipeline=None,
    )
    with BatchLoader(config, corpus, "train") as loader:
        yield stepper, loader


def test_a_step_reads_no_value_from_the_device(
    stepper_and_batches: tuple[Stepper, Iterator[Batch]],
) -> None:
    stepper, batches = stepper_and_batches
    # Clipping looks at its factor on a CPU alone, where there is no queue to wait for: only measured here.
    stepper = replace(stepper, max_norm=0.0)
    with CountReads() as counter:
        figures = stepper.step(batches, 1e-3, stop_requested=False)
    assert counter.reads == 0
    with counter:
        assert figures.loss_sum.item() > 0
    assert counter.reads == 1, "the counter sees a read when there is one"


def test_a_step_counts_every_rank_s_tokens_and_votes(
    stepper_and_batches: tuple[Stepper, Iterator[Batch]],
) -> None:
    stepper, batches = stepper_and_batches
    figures = stepper.step(batches, 1e-3, stop_requested=True)
    assert figures.tokens == 2 * 4 * 32
    assert figures.stop_votes == 1
    assert figures.exposed_wait is None
    assert all(parameter.grad is None for parameter in stepper.decoder.parameters())
    assert stepper.optimizer.param_groups[0]["lr"] == 1e-3


def test_a_run_and_its_continuation_unpickle_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_config(str(tiny.file), ["training.train_iters=3"])
    corpus = ensure_corpus(loaded.config.data, loaded.config.model)
    path = create_run(loaded, corpus, world_size=1, argv=["drivetrain"])

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    work(path, Ranks())
    events = path / "events.jsonl"
    events.write_bytes(
        b"".join(line for line in events.read_bytes().splitlines(True) if b'"end"' not in line)
    )
    result = work(path, Ranks())
    assert result.outcome.status == "finished"
    assert Path(path / "segments" / "0001").is_dir(), "it was continued"
