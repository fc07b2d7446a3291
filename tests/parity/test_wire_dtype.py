"""Gradients that travel in bf16: half the bytes, sums in the gradients' own dtype, and an error that is measured."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from parity_cases import OPTIMIZER, llama, micro_batches, valid_tokens

from drivetrain.config.layout import Layout
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.flat_collectives import CountedGroup
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.parallel.wire import LowPrecisionScatter, LowPrecisionSum
from rank_processes import on_kept_ranks

BF16 = torch.bfloat16
MODEL = llama(2, hidden_size=18, num_attention_heads=3, num_query_groups=1, vocab_size=47)
STEPS = 2


def part_of(rank: int, count: int) -> torch.Tensor:
    """(count,) fp32, what a rank contributes; sums of several need more bits than bf16 has."""
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def sums(count: int) -> dict[str, Any]:
    """Of ``count`` elements, whole and scattered, on this rank; and what gloo's own sum in bf16 is."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        traffic = Traffic()
        counted = CountedGroup(dist.group.WORLD, "dp", traffic)
        whole = part_of(group.ranks.rank, count)
        travelling = LowPrecisionSum(counted, whole, BF16)
        travelling.go_on()
        travelling.go_on()
        travelling.wait()
        per_rank = -(-count // group.size)
        buffer = torch.zeros(group.size * per_rank, dtype=BF16)
        buffer[:count] = part_of(group.ranks.rank, count)
        share = torch.full((per_rank,), torch.nan)
        LowPrecisionScatter(counted, share, buffer.view(group.size, -1)).wait()
        library = part_of(group.ranks.rank, count).to(BF16)
        dist.all_reduce(library)
        return {
            "whole": whole.numpy(),
            "share": share.numpy(),
            "library": library.float().numpy(),
            "counts": {key: (one.calls, one.bytes) for key, one in traffic.counts.items()},
        }


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_narrow_values_are_added_up_in_fp32_rank_by_rank(ranks: int, count: int) -> None:
    found = on_kept_ranks(sums, ranks, count)
    exact = torch.zeros(count)
    for rank in range(ranks):
        exact += part_of(rank, count).to(BF16).float()
    rounded = exact.to(BF16).float().numpy()
    per_rank = -(-count // ranks)
    padded = np.zeros(per_rank * ranks, dtype=np.float32)
    padded[:count] = exact.numpy()
    for rank, one in enumerate(found):
        assert np.array_equal(one["whole"], rounded)
        assert np.array_equal(one["share"], padded[rank * per_rank : (rank + 1) * per_rank])
        assert one["counts"] == {
            ("dp", "all_reduce"): (1, 2 * count),
            ("dp", "reduce_scatter"): (1, 2 * per_rank * ranks),
        }
    if (ranks, count) == (4, 1000):
        error = {name: float(np.abs(found[0][name] - exact.numpy()).sum()) for name in ("whole", "library")}
        assert error["whole"] < error["library"], "the library rounds after every addition"


def train(
    stage: int, narrow: bool, each: bool = False, shard: int | None = None, prefetch: int = 0
) -> dict[str, Any]:
    """Gradients of the first step, its error as it was measured, and what each step handed over."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(dp=group.size, dp_shard=shard), group.ranks.rank)
        decoder = Decoder(MODEL, torch.float32)
        initialize(decoder, 3)
        sync = gradient_sync(
            decoder,
            mesh,
            Traffic(),
            zero_stage=stage,
            bucket_size_mb=0.004,
            reduce_each_micro_batch=each,
            wire_dtype=BF16 if narrow else None,
            prefetch_blocks=prefetch,
            blocks=list(decoder.blocks.values()),
        )
        optimizer = build_optimizer(sync.updated(), OPTIMIZER)
        assert sync.wire_error() is None, "nothing was reduced yet"
        gradients: dict[str, np.ndarray] = {}
        travelled, dtypes = [], set()
        for step in range(STEPS):
            for number, batch in enumerate(micro_batches(MODEL, 2, mesh.index("dp"), group.size, step)):
                with sync.micro_batch(last=number == 1):
                    (decoder.loss_sum(batch) / valid_tokens(MODEL, step)).backward()
            sync.finish()
            if step == 0:
                gradients = {name: held.tensor.numpy().copy() for name, held in sync.gradients().items()}
            dtypes |= {held.tensor.dtype for held in sync.gradients().values()}
            sync.step(optimizer)
            travelled.append({key: count.bytes for key, count in sync.traffic.take().items()})
        assert dtypes == {torch.float32}
        return {"gradients": gradients, "error": sync.wire_error(), "travelled": travelled}


def difference(found: list[dict[str, Any]], exact: list[dict[str, Any]]) -> float:
    """``‖g - g0‖ / ‖g0‖`` over all ranks and parameters."""
    squares = np.zeros(2)
    for one, other in zip(found, exact, strict=True):
        for name, value in other["gradients"].items():
            squares += np.square(one["gradients"][name] - value).sum(), np.square(value).sum()
    return float(np.sqrt(squares[0] / squares[1]))


NARROWED = {("dp", "all_reduce"), ("dp_shard", "reduce_scatter")}


@pytest.mark.parametrize(
    ("stage", "each", "ranks", "shard", "prefetch"),
    [
        (0, False, 2, None, 0),
        (1, True, 2, None, 0),
        (2, False, 2, None, 0),
        (2, True, 2, None, 0),
        (3, False, 2, None, 0),
        (3, False, 2, None, 1),
        pytest.param(2, False, 4, 2, 0, marks=pytest.mark.long),
        pytest.param(3, False, 4, 2, 0, marks=pytest.mark.long),
        pytest.param(0, False, 4, None, 0, marks=pytest.mark.long),
    ],
)
def test_bytes_of_gradients_halve_and_the_error_is_the_one_that_is_told(
    stage: int, each: bool, ranks: int, shard: int | None, prefetch: int
) -> None:
    exact = on_kept_ranks(train, ranks, stage, False, each, shard, prefetch)
    found = on_kept_ranks(train, ranks, stage, True, each, shard, prefetch)
    for one, other in zip(found, exact, strict=True):
        assert other["error"] is None
        for narrow, wide in zip(one["travelled"], other["travelled"], strict=True):
            assert narrow.keys() == wide.keys()
            for key, size in wide.items():
                assert narrow[key] * (2 if key in NARROWED else 1) == size, key
    error = difference(found, exact)
    # bf16 has 8 bits: a value is rounded by at most 1/256 of itself, twice in a whole sum, and by a third of that on
    # average.
    assert 2e-4 < error < 2 / 256
    if not each and (stage < 2 or shard is None):
        assert found[0]["error"] == pytest.approx(error, rel=1e-3)
    else:
        # Of the first micro-batch's reduction, or of the ranks that share one set of shards.
        assert 2e-4 < found[0]["error"] < 2 / 256
