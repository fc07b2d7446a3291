"""The loader: the same samples for every layout, worker count and place of resumption."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

from drivetrain.config import RunConfig
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.model.batch import Batch
from drivetrain.errors import DataError

MakeConfig = Callable[..., RunConfig]
GLOBAL = 12


@pytest.fixture
def config(make_config: MakeConfig, numbered_corpus: Corpus) -> Callable[..., RunConfig]:
    def make(micro_batch_size: int = 3, **data: object) -> RunConfig:
        training = {"micro_batch_size": micro_batch_size, "global_batch_size": GLOBAL}
        return make_config(vocab_size=numbered_corpus.vocab_size, training=training, data=data)

    return make


def equal(first: Batch, second: Batch) -> bool:
    for field in fields(Batch):
        one, other = getattr(first, field.name), getattr(second, field.name)
        if not (torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other):
            return False
    return True


def take(loader: BatchLoader, count: int) -> list[Batch]:
    return [next(loader) for _ in range(count)]


def rows(batches: list[Batch]) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch.token_ids.tolist()]


def test_a_step_has_the_same_samples_for_every_layout(config: MakeConfig, numbered_corpus: Corpus) -> None:
    steps = 25
    whole = rows(take(BatchLoader(config(GLOBAL), numbered_corpus, "train"), steps))
    for micro, world_size in ((1, 1), (3, 2), (2, 3), (1, 12), (4, 3)):
        loaders = [
            BatchLoader(config(micro), numbered_corpus, "train", rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for step in range(steps):
            found = []
            for _ in range(loaders[0].num_microbatches):
                for loader in loaders:
                    found += rows([next(loader)])
            # Micro-batch by micro-batch, rank by rank, it is also the same order.
            assert found == whole[step * GLOBAL : (step + 1) * GLOBAL]


@pytest.mark.parametrize("rank", [0, 1])
def test_resuming_at_any_step_continues_the_same_batches(
    config: MakeConfig, numbered_corpus: Corpus, rank: int
) -> None:
    layout = {"rank": rank, "world_size": 2}
    straight = take(BatchLoader(config(), numbered_corpus, "train", **layout), 60)
    for step in (0, 1, 7, 11, 29):
        resumed = BatchLoader(config(), numbered_corpus, "train", **layout, start_sample=step * GLOBAL)
        for index in range(2 * step, min(60, 2 * step + 6)):
            assert equal(next(resumed), straight[index])


def test_resuming_after_a_change_of_layout_continues_the_same_samples(
    config: MakeConfig, numbered_corpus: Corpus
) -> None:
    straight = rows(take(BatchLoader(config(GLOBAL), numbered_corpus, "train"), 10))
    resumed = BatchLoader(config(4), numbered_corpus, "train", start_sample=5 * GLOBAL)
    assert rows(take(resumed, 3)) == straight[5 * GLOBAL : 6 * GLOBAL]


def test_any_number_of_workers_gives_the_same_batches(config: MakeConfig, numbered_corpus: Corpus) -> None:
    expected = take(BatchLoader(config(), numbered_corpus, "train", start_sample=24), 40)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for num_workers in (1, 2):
        workers = config(num_workers=num_workers, prefetch_factor=3)
        with BatchLoader(workers, numbered_corpus, "train", start_sample=24) as loader:
            assert len(loader._children) == num_workers
            assert all(map(equal, take(loader, 40), expected))
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_are_gone_after_closing_even_in_the_middle(
    config: MakeConfig, numbered_corpus: Corpus
) -> None:
    # Other tests keep processes of their own.
    others = set(multiprocessing.active_children())
    loader = BatchLoader(config(num_workers=2), numbered_corpus, "train")
    next(loader)
    assert len(set(multiprocessing.active_children()) - others) == 2
    loader.close()
    loader.close()
    assert not set(multiprocessing.active_children()) - others


def test_a_number_of_samples_ends_the_loader(config: MakeConfig, numbered_corpus: Corpus) -> None:
    for num_workers in (0, 1):
        with BatchLoader(
            config(num_workers=num_workers), numbered_corpus, "train", num_samples=2 * GLOBAL
        ) as loader:
            assert loader.num_steps == 2
            assert len(list(loader)) == 8
            assert list(loader) == []
    assert list(BatchLoader(config(num_workers=1), numbered_corpus, "train", num_samples=0)) == []


def test_evaluation_is_at_most_one_pass_and_the_same_for_every_layout(
    config: MakeConfig, numbered_corpus: Corpus
) -> None:
    totals = []
    for micro, world_size in ((GLOBAL, 1), (3, 2), (1, 4)):
        batches: list[Batch] = []
        for rank in range(world_size):
            settings = config(micro, split="70,30", num_workers=2)
            loader = BatchLoader(settings, numbered_corpus, "validation", rank=rank, world_size=world_size)
            assert loader.num_steps == -(-loader.samples_per_epoch // GLOBAL)
            batches += loader
        labels = [labels for batch in batches for labels in batch.labels[batch.loss_mask].tolist()]
        assert len(labels) == len(set(labels))
        totals.append(sorted(labels))
    assert totals[0] == totals[1] == totals[2]
    assert len(totals[0]) == loader.samples_per_epoch * 8
    short = BatchLoader(config(split="70,30"), numbered_corpus, "validation", num_samples=GLOBAL)
    assert short.num_steps == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_transforms_fault_is_one_message_without_a_traceback(
    config: MakeConfig, numbered_corpus: Corpus, num_workers: int
) -> None:
    settings = config(num_workers=num_workers, transform="data_transforms:fail")
    with (
        BatchLoader(settings, numbered_corpus, "train") as loader,
        pytest.raises(DataError, match="it raised KeyError") as caught,
    ):
        next(loader)
    assert "\n" not in str(caught.value)


def test_a_worker_that_was_killed_is_reported(config: MakeConfig, numbered_corpus: Corpus) -> None:
    with BatchLoader(config(num_workers=1, prefetch_factor=1), numbered_corpus, "train") as loader:
        next(loader)
        os.kill(loader._children[0].pid, signal.SIGKILL)
        with pytest.raises(DataError, match="a data worker died"):
            take(loader, 10)


def test_workers_leave_signals_to_the_trainer(config: MakeConfig, numbered_corpus: Corpus) -> None:
    with BatchLoader(config(num_workers=2), numbered_corpus, "train") as loader:
        # Batches of both: each is past its start.
        take(loader, 2)
        for child in loader._children:
            os.kill(child.pid, signal.SIGINT)
            os.kill(child.pid, signal.SIGTERM)
        take(loader, 30)
        assert all(child.is_alive() for child in loader._children)


def test_runs_that_share_data_seed_see_the_same_samples_whatever_run_seed(
    config: MakeConfig, numbered_corpus: Corpus
) -> None:
    def first_rows(run_seed: int, data_seed: int | None) -> list[tuple[int, ...]]:
        made = config(seed=data_seed)
        made = made.model_copy(update={"run": made.run.model_copy(update={"seed": run_seed})})
        return rows(take(BatchLoader(made, numbered_corpus, "train"), 4))

    assert first_rows(1, 7) == first_rows(2, 7)
    assert first_rows(7, None) == first_rows(1, 7), "absent: run.seed"
    assert first_rows(1, 7) != first_rows(1, 8)
