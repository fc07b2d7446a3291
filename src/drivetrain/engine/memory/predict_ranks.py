"""The prediction for several ranks: each in a process of its own, because a process is one rank only."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from drivetrain.config import RunConfig, layout_of
from drivetrain.config.derive import microbatches_per_rank
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.dry_run_processes import Failure, RankTask, answers_of_processes
from drivetrain.engine.dry_run_world import PlannedWorld
from drivetrain.engine.memory.predict import predict_memory
from drivetrain.errors import DrivetrainError
from drivetrain.measure.machine import usable_cores
from drivetrain.measure.memory import MemoryByCategory

__all__ = ["documents_of_step", "predict_ranks", "representative_ranks"]

_TIME_LIMIT_S = 600.0

Documents = Mapping[int, Sequence[Sequence[int]]]
"""Rank → borders of the documents in each of its micro-batches."""


def representative_ranks(config: RunConfig, world_size: int) -> list[int]:
    """One rank of each kind: ranks of one kind hold tensors of the same shapes."""
    return PlannedWorld.of(config, world_size).representatives


def predict_ranks(
    config: RunConfig,
    world_size: int,
    ranks: Sequence[int],
    documents: Documents,
    *,
    progress: Callable[[int], None],
    time_limit_s: float = _TIME_LIMIT_S,
) -> Mapping[int, MemoryByCategory | Failure]:
    """What each of ``ranks`` holds during a step, or why nothing is known of it.

    Args:
        documents: of the ranks for which they are known.
        progress: called with the number of ranks that are done.
        time_limit_s: for each rank.
    """
    if world_size == 1:
        try:
            found: MemoryByCategory | Failure = predict_memory(config, documents=documents.get(0))
        except DrivetrainError as error:
            found = Failure(str(error))
        return {0: found}
    plain = {rank: [list(borders) for borders in of_rank] for rank, of_rank in documents.items()}
    answers = answers_of_processes(
        config,
        world_size,
        [RankTask(rank, with_step=True) for rank in ranks],
        partial(_predicted, plain),
        at_once=usable_cores(),
        time_limit_s=time_limit_s,
        progress=progress,
    )
    return {
        rank: one if isinstance(one, Failure) else MemoryByCategory.from_document(one)
        for rank, one in answers.items()
    }


def _predicted(documents: Documents, config: RunConfig, world_size: int, task: RankTask) -> object:
    return predict_memory(config, world_size, task.rank, documents=documents.get(task.rank)).to_document()


def documents_of_step(
    config: RunConfig, world_size: int, ranks: Sequence[int], corpus: Corpus, step: int
) -> Documents:
    """Borders of the documents that ``ranks`` read in step number ``step`` of a run that began with step 1.

    Raises:
        DataError: the corpus is too small.
    """
    layout = layout_of(config, world_size)
    by_place: dict[int, list[list[int]]] = {}
    for place in {layout.coordinates(rank)["dp"] for rank in ranks}:
        with BatchLoader(
            config,
            corpus,
            "train",
            rank=place,
            world_size=layout.dp,
            start_sample=(step - 1) * config.training.global_batch_size,
            num_samples=config.training.global_batch_size,
            num_workers=0,
        ) as loader:
            count = microbatches_per_rank(config, layout.dp)
            by_place[place] = [next(loader).cu_seqlens.tolist() for _ in range(count)]
    return {rank: by_place[layout.coordinates(rank)["dp"]] for rank in ranks}
