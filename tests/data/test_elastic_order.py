"""Elastic: whatever the number of ranks, the workers and the places where a run was killed, an epoch is one epoch."""

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType

import numpy as np
import pytest

from drivetrain.config import RunConfig
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.data.opening import samples_of

GLOBAL = 12
WORLDS = (1, 2, 3, 4, 6)
PACKINGS = ("concatenate", "best_fit", "pad")
MakeConfig = Callable[..., RunConfig]
Row = tuple[int, ...]


@pytest.fixture
def config(make_config: MakeConfig, numbered_corpus: Corpus) -> MakeConfig:
    def make(micro_batch_size: int = 1, **data: object) -> RunConfig:
        training = {"micro_batch_size": micro_batch_size, "global_batch_size": GLOBAL}
        return make_config(vocab_size=numbered_corpus.vocab_size, seq_length=20, training=training, data=data)

    return make


def steps_of(
    config: RunConfig,
    corpus: Corpus,
    world_size: int,
    first_step: int,
    last_step: int,
    how: Mapping[str, int] = MappingProxyType({}),
) -> list[list[Row]]:
    """The rows of each step, as all ranks of a job that starts at ``first_step`` get them.

    Args:
        how: of the last rank, the workers or batches ahead; the others have none.
    """
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(
                BatchLoader(
                    config,
                    corpus,
                    "train",
                    rank=rank,
                    world_size=world_size,
                    start_sample=first_step * GLOBAL,
                    **(how if rank == world_size - 1 else {}),
                )
            )
            for rank in range(world_size)
        ]
        return [
            [
                tuple(row)
                for _ in range(loaders[0].num_microbatches)
                for loader in loaders
                for row in next(loader).labels.tolist()
            ]
            for _ in range(first_step, last_step)
        ]


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_epoch_has_the_same_samples_for_every_world_and_none_twice(
    config: MakeConfig, numbered_corpus: Corpus, packing: str
) -> None:
    made = config(packing=packing)
    epoch = samples_of(numbered_corpus, made.data, "train", 20, 1).num_samples
    steps = -(-epoch // GLOBAL)
    expected = steps_of(made, numbered_corpus, 1, 0, steps)
    rows = [row for step in expected for row in step][:epoch]
    assert set(Counter(rows).values()) == {1}
    for world_size in WORLDS[1:]:
        assert steps_of(made, numbered_corpus, world_size, 0, steps) == expected, world_size


THREADS = ({}, {"prefetch_batches": 3})
WORKERS = (*THREADS, {"num_workers": 1}, {"num_workers": 2})


@pytest.mark.parametrize(
    ("packing", "hows"),
    [
        ("concatenate", THREADS),
        *(pytest.param(one, WORKERS, marks=pytest.mark.long) for one in PACKINGS),
    ],
)
def test_fifty_kills_with_other_worlds_and_workers_after_each_lose_and_repeat_nothing(
    config: MakeConfig, numbered_corpus: Corpus, packing: str, hows: Sequence[Mapping[str, int]]
) -> None:
    made = config(packing=packing)
    random = np.random.default_rng(7)
    step, kept = 0, []
    for _ in range(50):
        # Steps after the last checkpoint are lost with the job, and done again by the next one.
        saved = step + int(random.integers(0, 4))
        killed = saved + int(random.integers(0, 3))
        world_size, how = int(random.choice(WORLDS)), hows[int(random.integers(0, len(hows)))]
        kept += steps_of(made, numbered_corpus, world_size, step, killed, how)[: saved - step]
        step = saved
    assert step > 50
    assert kept == steps_of(made, numbered_corpus, 1, 0, step)
    # Each epoch that is over has had each sample once.
    rows = [row for one in kept for row in one]
    epoch = samples_of(numbered_corpus, made.data, "train", 20, 1).num_samples
    epochs = [Counter(rows[start : start + epoch]) for start in range(0, len(rows) - epoch + 1, epoch)]
    assert len(epochs) > 5
    assert all(one == epochs[0] for one in epochs)
    assert set(epochs[0].values()) == {1}


def test_four_ranks_stop_and_six_go_on_in_the_middle_of_an_epoch(
    config: MakeConfig, numbered_corpus: Corpus
) -> None:
    made = config()
    epoch = samples_of(numbered_corpus, made.data, "train", 20, 1).num_samples
    middle, end = epoch // GLOBAL // 2, epoch // GLOBAL
    assert 0 < middle < end
    changed = [
        *steps_of(made, numbered_corpus, 4, 0, middle),
        *steps_of(made, numbered_corpus, 6, middle, end),
    ]
    assert changed == steps_of(made, numbered_corpus, 1, 0, end)
    rows = [row for step in changed for row in step]
    assert len(rows) == len(set(rows))


def test_the_hash_of_the_order_tells_orders_apart_and_nothing_else(
    config: MakeConfig, numbered_corpus: Corpus
) -> None:
    def order_hash(seed: int = 1, **data: object) -> str:
        return samples_of(numbered_corpus, config(**data).data, "train", 20, seed).order_hash()

    assert order_hash() == order_hash(num_workers=2, prefetch_batches=3, reset_attention_mask=False)
    assert len({order_hash(), order_hash(seed=2), *(order_hash(packing=one) for one in PACKINGS)}) == 4


def test_every_batch_has_one_shape_the_last_held_out_one_included(
    config: MakeConfig, numbered_corpus: Corpus
) -> None:
    for packing in PACKINGS:
        made = config(4, packing=packing, split="70,30")
        held_out = list(BatchLoader(made, numbered_corpus, "validation"))
        training = BatchLoader(made, numbered_corpus, "train")
        shapes = {tuple(batch.token_ids.shape) for batch in (*held_out, *(next(training) for _ in range(30)))}
        assert shapes == {(4, 20)}


@pytest.fixture
def large(write_corpus: Callable[..., str]) -> Corpus:
    """20,000 documents: a loader holds a megabyte of where they are."""
    return Corpus.open(write_corpus([[7, 8, 9]] * 20_000), vocab_size=100)


@pytest.mark.parametrize("how", [{}, {"prefetch_batches": 3}])
def test_a_loader_that_is_rebuilt_a_hundred_times_leaves_nothing_behind(
    make_config: MakeConfig, large: Corpus, how: dict[str, int]
) -> None:
    made = make_config(training={"micro_batch_size": 4, "global_batch_size": GLOBAL})

    def rebuild(times: int) -> None:
        for _ in range(times):
            with BatchLoader(made, large, "train", **how) as loader:
                for _ in range(3):
                    next(loader)
            del loader

    rebuild(10)
    before = threading.active_count(), len(os.listdir("/proc/self/fd")), resident_bytes()
    rebuild(100)
    after = threading.active_count(), len(os.listdir("/proc/self/fd")), resident_bytes()
    # One left behind by each would be a hundred. What else this process has may come or go meanwhile.
    assert max(last - first for first, last in zip(before[:2], after[:2], strict=True)) < 50
    # A loader that is kept holds a megabyte, and 100 of them would hold a hundred.
    assert after[2] - before[2] < 20_000_000


@pytest.mark.long
def test_loaders_with_workers_are_rebuilt_without_leaving_processes_behind(
    config: MakeConfig, numbered_corpus: Corpus
) -> None:
    others = set(multiprocessing.active_children())
    made = config(num_workers=1)
    counts = []
    for attempt in range(12):
        with BatchLoader(made, numbered_corpus, "train") as loader:
            next(loader)
        del loader
        assert not set(multiprocessing.active_children()) - others
        if attempt >= 2:
            counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    # One left behind by each loader would be nine. What else this process has may come or go meanwhile.
    grown = [last - first for first, last in zip(counts[0], counts[-1], strict=True)]
    assert max(grown) < 5, counts


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
