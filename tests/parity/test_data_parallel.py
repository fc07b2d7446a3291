"""Gradients over several ranks equal those of one process, whatever each rank's share of valid tokens."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from drivetrain.config import ModelConfig
from drivetrain.config.layout import Layout
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

MODEL = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=12, vocab_size=50)
ROWS = 8


def rows(first: int, last: int) -> Batch:
    """Rows of one fixed global batch; the loss masks make their valid tokens very unequal."""
    generator = torch.Generator().manual_seed(5)
    length = MODEL.seq_length
    ids = torch.randint(MODEL.vocab_size, (ROWS, length + 1), generator=generator)
    mask = torch.arange(length)[None] < torch.tensor([12, 1, 7, 0, 3, 12, 2, 5])[:, None]
    part = slice(first, last)
    count = last - first
    return Batch(
        token_ids=ids[part, :-1],
        labels=ids[part, 1:],
        loss_mask=mask[part],
        position_ids=torch.arange(length).expand(count, length),
        cu_seqlens=torch.arange(0, count * length + 1, length, dtype=torch.int32),
        num_valid_tokens=int(mask[part].sum()),
        sum_squared_lengths=count * length**2,
    )


def gradients(num_microbatches: int, steps: int, bucket_size_mb: float) -> dict[str, np.ndarray]:
    """This rank's gradients after backward over its share, in ``num_microbatches`` pieces.

    Several steps, each with buckets that hold the gradients of the one before.
    """
    torch.manual_seed(0)
    decoder = Decoder(MODEL, torch.float64)
    initialize(decoder, 3)
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        rank, size = group.ranks.rank, group.size
        mesh = Mesh.form(Layout(dp=size), rank)
        sync = gradient_sync(decoder, mesh, Traffic(), zero_stage=0, bucket_size_mb=bucket_size_mb)
        per_piece = ROWS // size // num_microbatches
        for _ in range(steps):
            decoder.zero_grad(set_to_none=True)
            batches = [
                rows(start, start + per_piece)
                for start in ((piece * size + rank) * per_piece for piece in range(num_microbatches))
            ]
            totals = group.start_sum([sum(batch.num_valid_tokens for batch in batches)]).wait()
            for index, batch in enumerate(batches):
                with sync.micro_batch(last=index == num_microbatches - 1):
                    (decoder.loss_sum(batch) / totals[0]).backward()
            sync.finish()
        assert (sync.exposed_wait() is None) == (size == 1)
        return {name: parameter.grad.numpy().copy() for name, parameter in decoder.named_parameters()}


def plain_gradients() -> dict[str, np.ndarray]:
    """One process, one batch, no engine around the model."""
    decoder = Decoder(MODEL, torch.float64)
    initialize(decoder, 3)
    batch = rows(0, ROWS)
    (decoder.loss_sum(batch) / batch.num_valid_tokens).backward()
    return {name: parameter.grad.numpy() for name, parameter in decoder.named_parameters()}


def worst_difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert found.keys() == expected.keys()
    return max(
        float(np.linalg.norm(found[name] - expected[name]) / np.linalg.norm(expected[name]))
        for name in expected
    )


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
def test_gradients_do_not_depend_on_the_micro_batch_split(num_microbatches: int) -> None:
    decoder_gradients = gradients(num_microbatches, 1, 25.0)
    assert worst_difference(decoder_gradients, plain_gradients()) < 1e-12


@pytest.mark.parametrize(
    ("world_size", "num_microbatches", "bucket_size_mb"), [(2, 1, 25.0), (2, 2, 0.002), (4, 1, 0.002)]
)
def test_gradients_over_ranks_equal_one_process(
    world_size: int, num_microbatches: int, bucket_size_mb: float
) -> None:
    expected = plain_gradients()
    for found in on_kept_ranks(gradients, world_size, num_microbatches, 3, bucket_size_mb):
        assert worst_difference(found, expected) < 1e-9


def counted_messages() -> tuple[list[int], str, float, int]:
    """What the small messages between ranks carry."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        rank = group.ranks.rank
        sums = group.start_sum([rank + 1, 10 * rank]).wait()
        text = group.broadcast_text(f"from rank {rank}: größer")
        most = group.maximum(float(rank))
        tensor = torch.full((3,), float(rank))
        group.sum_(tensor)
        group.barrier()
        return sums, text, most, int(tensor.sum())


def test_messages_between_ranks() -> None:
    for sums, text, most, total in on_kept_ranks(counted_messages, 3):
        assert sums == [6, 30]
        assert text == "from rank 0: größer"
        assert most == 2.0
        assert total == 9


def test_one_rank_needs_no_group() -> None:
    with join(Ranks(), "cpu", 1.0) as group:
        assert isinstance(group, ProcessGroup)
        assert not torch.distributed.is_initialized()
        assert group.start_sum([3, 4]).wait() == [3, 4]
        assert group.broadcast_text("alone") == "alone"
        assert group.maximum(2.5) == 2.5


def collective_after_timeout(folder: str) -> str:
    """Rank 1 never comes; rank 0's collective must end by itself."""
    # The limit of three seconds holds for joining as well: nobody begins before everybody is there.
    (Path(folder) / f"rank{os.environ['RANK']}_is_there").touch()
    while len(list(Path(folder).glob("rank*_is_there"))) < 2:
        time.sleep(0.01)
    try:
        with join(Ranks.from_environment(), "cpu", 0.05) as group:
            if group.ranks.rank == 0:
                group.barrier()
                return "the barrier was passed"
            marker = Path(folder) / "rank0_is_done"
            while not marker.exists():
                torch.zeros(1).add_(1)
            return "late"
    except RuntimeError as error:
        (Path(folder) / "rank0_is_done").touch()
        return f"raised {type(error).__name__}"


def test_a_missing_rank_ends_the_collective_after_the_configured_timeout(tmp_path: Path) -> None:
    first, second = on_kept_ranks(collective_after_timeout, 2, str(tmp_path))
    assert first.startswith("raised")
    assert second == "late"
