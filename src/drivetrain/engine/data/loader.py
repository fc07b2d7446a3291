"""Micro-batches in order, built in this process, by a thread of it, or ahead of time by worker processes."""

import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from drivetrain.config import RunConfig, data_seed
from drivetrain.engine.data.ahead import Ahead
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.opening import samples_of
from drivetrain.engine.data.sample_cache import make_room
from drivetrain.engine.data.samples import Samples
from drivetrain.engine.data.split import Split
from drivetrain.engine.model.batch import Batch
from drivetrain.errors import DataError, DrivetrainError, EnvironmentFault

__all__ = ["BatchLoader", "BuildingTimes"]

WARM_UP_AHEAD = 4
"""Micro-batches ahead of the one that is built, of whose pages the system is told."""


@dataclass(frozen=True)
class _Item:
    """A micro-batch, how long each operation took to build it, and how many of its rows came from where."""

    batch: Batch
    seconds: dict[str, float]
    built_rows: int
    cached_rows: int
    cache_fault: str | None


@dataclass(frozen=True)
class _Failure:
    """A user's error on its way out of a worker: as data, so that the message arrives without a traceback."""

    message: str


@dataclass
class BuildingTimes:
    """What building batches took, by operation, wherever they were built.

    Attributes:
        seconds: operation → seconds, of ``batches`` micro-batches.
        batches: micro-batches that were taken.
        built_rows, cached_rows: of them, built from documents, or read from the sample cache.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    batches: int = 0
    built_rows: int = 0
    cached_rows: int = 0

    def add(self, item: _Item) -> None:
        """Count one micro-batch."""
        for operation, seconds in item.seconds.items():
            self.seconds[operation] = self.seconds.get(operation, 0.0) + seconds
        self.batches += 1
        self.built_rows += item.built_rows
        self.cached_rows += item.cached_rows

    @property
    def slowest(self) -> str | None:
        """The operation that took most; None before the first batch."""
        return max(self.seconds, key=lambda name: (self.seconds[name], name), default=None)


@dataclass(frozen=True)
class _MicroBatches(Dataset[_Item | _Failure]):
    """The micro-batches of one rank by their number.

    Global batch t of G samples starts at sample ``start + t * G``; micro-batch m of rank r takes its slice
    number ``m * world_size + r``. So the samples of a step are the same for every layout.
    """

    samples: Samples
    rank: int
    world_size: int
    start_sample: int
    global_batch_size: int
    micro_batch_size: int

    def numbers(self, index: int) -> NDArray[np.int64]:
        """(micro_batch_size,) int64 samples of micro-batch ``index``."""
        per_step = self.global_batch_size // (self.micro_batch_size * self.world_size)
        step, micro = divmod(index, per_step)
        first = self.start_sample + step * self.global_batch_size
        first += (micro * self.world_size + self.rank) * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size, dtype=np.int64)

    def __getitem__(self, index: int) -> _Item | _Failure:
        samples = self.samples
        if samples.split == "train":
            for ahead in range(index, index + WARM_UP_AHEAD + 1) if index == 0 else (index + WARM_UP_AHEAD,):
                samples.warm_up(self.numbers(ahead))
        try:
            batch = samples.batch(self.numbers(index))
        except DrivetrainError as error:
            return _Failure(str(error))
        fault = next((cache.fault for cache in samples.caches if cache.fault is not None), None)
        return _Item(batch, samples.times.take(), *samples.counts.take(), fault)


class BatchLoader(Iterator[Batch]):
    """The micro-batches of one rank and split: ``num_microbatches`` of them for each step, all of one shape.

    The same batches to the bit for any number of workers, and from any ``start_sample`` on. Only training
    batches are built by ``data.num_workers`` processes or a thread; evaluation builds its own.

    Args:
        config: the run; read are model.seq_length, data, training's batch sizes and the data's seed.
        corpus: an opened corpus, or a blend.
        split: ``train`` (endless without ``num_samples``) or ``validation`` (at most one pass; samples that
            fill its last global batch carry no loss).
        rank, world_size: this process among the data-parallel ranks.
        start_sample: samples consumed before, over all ranks.
        num_samples: samples to give, over all ranks: a multiple of the global batch.
        num_workers: instead of ``data.num_workers``.
        prefetch_batches: micro-batches that a thread builds ahead where there are no workers; 0: none.
        sample_cache: folder and bound (bytes) of finished rows that are kept; None: none are. Training only.
    Attributes:
        num_steps: global batches it gives; None for endless.
        num_microbatches: micro-batches in a step of this rank.
        samples_per_epoch: samples in one pass over the split.
        tokens_per_epoch: tokens of the split.
        samples: what its batches are made of.
        building: what building the batches that were taken has cost.
        cache_fault: why no sequences are kept, or no more of them; None: they are, or nobody asked.
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
        prefetch_batches: int = 0,
        sample_cache: tuple[Path, int] | None = None,
    ) -> None:
        training, data = config.training, config.data
        per_pass = training.micro_batch_size * world_size
        assert training.global_batch_size % per_pass == 0, "a rule of the configuration"
        samples = samples_of(corpus, data, split, config.model.seq_length, data_seed(config))
        self.samples = samples
        self.samples_per_epoch = samples.num_samples
        self.tokens_per_epoch = samples.num_tokens
        self.num_microbatches = training.global_batch_size // per_pass
        self.building = BuildingTimes()
        self.cache_fault: str | None = None
        if sample_cache is not None and split == "train":
            self._keep_rows(*sample_cache)
        assert num_samples is None or num_samples % training.global_batch_size == 0
        steps = None if num_samples is None else num_samples // training.global_batch_size
        if split == "validation":
            one_pass = -(-(samples.num_samples - start_sample) // training.global_batch_size)
            steps = max(0, one_pass if steps is None else min(steps, one_pass))
        self.num_steps = steps
        self._micro_batches = _MicroBatches(
            samples, rank, world_size, start_sample, training.global_batch_size, training.micro_batch_size
        )
        self._given = 0
        self._children: list[Any] = []
        self._workers: Iterator[_Item | _Failure] | None = None
        self._ahead: Ahead[_Item | _Failure] | None = None
        num_workers = data.num_workers if num_workers is None else num_workers
        if split != "train" or self.num_steps == 0:
            return
        if num_workers:
            self._workers = self._start_workers(num_workers, data.prefetch_factor)
        elif prefetch_batches:
            numbers = range(2**62 if self._total is None else self._total)
            self._ahead = Ahead(map(self._micro_batches.__getitem__, numbers), prefetch_batches)

    def _keep_rows(self, folder: Path, num_bytes: int) -> None:
        try:
            self.samples.use_cache(folder, num_bytes)
            make_room(folder, self.samples.caches, num_bytes)
        except EnvironmentFault as error:
            self.cache_fault = str(error)

    def _start_workers(self, num_workers: int, prefetch_factor: int) -> Iterator[_Item | _Failure]:
        # A fork of this process would copy torch's threads in an unknown state.
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            # torch is then imported once for all workers.
            context.set_forkserver_preload([__name__])
        before = set(multiprocessing.active_children())
        loader = DataLoader(
            cast("Dataset[_Item]", self._micro_batches),
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
    def prefetches(self) -> bool:
        """Whether a thread builds batches ahead."""
        return self._ahead is not None

    @property
    def _total(self) -> int | None:
        return None if self.num_steps is None else self.num_steps * self.num_microbatches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch, on the host."""
        if self._total is not None and self._given >= self._total:
            raise StopIteration
        if self._workers is not None:
            item = self._from_worker(self._workers)
        else:
            item = self._micro_batches[self._given] if self._ahead is None else next(self._ahead)
        if isinstance(item, _Failure):
            raise DataError(item.message)
        self._given += 1
        self.building.add(item)
        if self.cache_fault is None:
            self.cache_fault = item.cache_fault
        if torch.autograd.profiler._is_profiler_enabled:
            self._mark(item)
        return item.batch

    def _mark(self, item: _Item) -> None:
        """Marks inside the span of the fetch: where a profiled batch came from."""
        facts = {
            "prefetched": self._ahead is not None,
            "packed": self.samples.packs,
            "baked": self.samples.is_baked,
            "sample_cache": item.cached_rows > 0,
            "sample_cache_filled": item.cached_rows == 0 and bool(self.samples.caches),
        }
        for name, holds in facts.items():
            if holds:
                with torch.profiler.record_function(f"drivetrain/fetch/{name}"):
                    pass

    @staticmethod
    def _from_worker(workers: Iterator[_Item | _Failure]) -> _Item | _Failure:
        try:
            return next(workers)
        except (RuntimeError, EOFError, ConnectionError) as error:
            # How torch reports a worker that was killed, for example for want of memory; and how Python does where it
            # died in the middle of handing a batch over.
            why = str(error) or type(error).__name__
            raise DataError(f"a data worker died: {why}; data.num_workers = 0 uses none") from error

    def close(self) -> None:
        """Stop the workers and the thread. Safe to call twice."""
        if self._ahead is not None:
            self._ahead.close()
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
