"""Micro-batches in order, built in this process or ahead of time by worker processes."""

import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain.config import RunConfig, data_seed
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.sequences import Sequences
from drivetrain.engine.data.split import Split
from drivetrain.engine.model.batch import Batch
from drivetrain.errors import DataError, DrivetrainError

__all__ = ["BatchLoader"]


@dataclass(frozen=True)
class _Failure:
    """A user's error on its way out of a worker: as data, so that the message arrives without a traceback."""

    message: str


@dataclass(frozen=True)
class _MicroBatches(Dataset[Batch | _Failure]):
    """The micro-batches of one rank by their number.

    Global batch t of G samples starts at sample ``start + t * G``; micro-batch m of rank r takes its slice
    number ``m * world_size + r``. So the samples of a step are the same for every layout.
    """

    sequences: Sequences
    rank: int
    world_size: int
    start_sample: int
    global_batch_size: int
    micro_batch_size: int

    def __getitem__(self, index: int) -> Batch | _Failure:
        per_step = self.global_batch_size // (self.micro_batch_size * self.world_size)
        step, micro = divmod(index, per_step)
        first = self.start_sample + step * self.global_batch_size
        first += (micro * self.world_size + self.rank) * self.micro_batch_size
        try:
            return self.sequences.batch(np.arange(first, first + self.micro_batch_size, dtype=np.int64))
        except DrivetrainError as error:
            return _Failure(str(error))


class BatchLoader(Iterator[Batch]):
    """The micro-batches of one rank and split: ``num_microbatches`` of them for each step.

    The same batches to the bit for any number of workers, and from any ``start_sample`` on. Only training
    batches are built by ``data.num_workers`` processes; evaluation builds its own.

    Args:
        config: the run; read are model.seq_length, data, training's batch sizes and the data's seed.
        corpus: an opened corpus.
        split: ``train`` (endless without ``num_samples``) or ``validation`` (at most one pass; samples that
            fill its last global batch carry no loss).
        rank, world_size: this process among the data-parallel ranks.
        start_sample: samples consumed before, over all ranks.
        num_samples: samples to give, over all ranks: a multiple of the global batch.
        num_workers: instead of ``data.num_workers``.
    Attributes:
        num_steps: global batches it gives; None for endless.
        num_microbatches: micro-batches in a step of this rank.
        samples_per_epoch: samples in one pass over the split.
        tokens_per_epoch: tokens of the split.
    Raises:
        DataError: the split is too small for one sample; from ``next``: a transform's fault, a dead worker.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        split: Split,
        *,
        rank: int = 0,
        world_size: int = 1,
        start_sample: int = 0,
        num_samples: int | None = None,
        num_workers: int | None = None,
    ) -> None:
        training, data = config.training, config.data
        per_pass = training.micro_batch_size * world_size
        assert training.global_batch_size % per_pass == 0, "a rule of the configuration"
        sequences = Sequences(corpus, data, split, config.model.seq_length, data_seed(config))
        self.samples_per_epoch = sequences.num_samples
        self.tokens_per_epoch = sequences.num_tokens
        self.num_microbatches = training.global_batch_size // per_pass
        assert num_samples is None or num_samples % training.global_batch_size == 0
        steps = None if num_samples is None else num_samples // training.global_batch_size
        if split == "validation":
            one_pass = -(-(sequences.num_samples - start_sample) // training.global_batch_size)
            steps = max(0, one_pass if steps is None else min(steps, one_pass))
        self.num_steps = steps
        self._micro_batches = _MicroBatches(
            sequences, rank, world_size, start_sample, training.global_batch_size, training.micro_batch_size
        )
        self._given = 0
        self._children: list[Any] = []
        self._workers: Iterator[Batch | _Failure] | None = None
        num_workers = data.num_workers if num_workers is None else num_workers
        if num_workers and split == "train" and self.num_steps != 0:
            self._workers = self._start_workers(num_workers, data.prefetch_factor)

    def _start_workers(self, num_workers: int, prefetch_factor: int) -> Iterator[Batch | _Failure]:
        # A fork of this process would copy torch's threads in an unknown state.
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            # torch is then imported once for all workers.
            context.set_forkserver_preload([__name__])
        before = set(multiprocessing.active_children())
        loader = DataLoader(
            cast("Dataset[Batch]", self._micro_batches),
            batch_size=None,
            sampler=range(2**62 if self._total is None else self._total),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            collate_fn=_as_it_is,
            worker_init_fn=_leave_signals_to_the_trainer,
            multiprocessing_context=context,
            # Its own generator: drawing a seed from the global one would change the run's dropout.
            generator=torch.Generator(),
        )
        workers = iter(loader)
        self._children = [child for child in multiprocessing.active_children() if child not in before]
        return workers

    @property
    def workers_alive(self) -> int:
        """Worker processes that live; 0 where this process builds the batches."""
        return sum(child.is_alive() for child in self._children)

    @property
    def _total(self) -> int | None:
        return None if self.num_steps is None else self.num_steps * self.num_microbatches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch, on the host."""
        if self._total is not None and self._given >= self._total:
            raise StopIteration
        item = self._micro_batches[self._given] if self._workers is None else self._from_worker(self._workers)
        if isinstance(item, _Failure):
            raise DataError(item.message)
        self._given += 1
        return item

    @staticmethod
    def _from_worker(workers: Iterator[Batch | _Failure]) -> Batch | _Failure:
        try:
            return next(workers)
        except (RuntimeError, EOFError, ConnectionError) as error:
            # How torch reports a worker that was killed, for example for want of memory; and how Python does where it
            # died in the middle of handing a batch over.
            why = str(error) or type(error).__name__
            raise DataError(f"a data worker died: {why}; data.num_workers = 0 uses none") from error

    def close(self) -> None:
        """Stop the workers. Safe to call twice."""
        # torch asks the workers to stop when their iterator goes, and waits for each a few seconds.
        self._workers = None
        for child in self._children:
            if child.is_alive():
                child.kill()
            child.join()
        self._children = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _as_it_is(item: Any) -> Any:
    return item


def _leave_signals_to_the_trainer(worker: int) -> None:
    # A terminal's Ctrl-C and a scheduler's SIGTERM reach every process of the group. The trainer finishes
    # its step and saves; it must still get batches, and ends its workers itself.
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
