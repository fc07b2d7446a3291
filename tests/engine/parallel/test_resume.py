"""Training that is saved and continued: in the same layout to the bit, in another one up to round-off."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drivetrain.config import OptimizerConfig
from drivetrain.config.layout import Layout
from drivetrain.config.model import ModelConfig
from drivetrain.engine.checkpoint import agreement_over, held_state, load_checkpoint, save_checkpoint
from drivetrain.engine.model.batch import Batch, whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

# 47 words, 18 and 23 wide: nothing divides by the number of ranks, and a norm has short parts.
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=18,
    ffn_hidden_size=23,
    num_attention_heads=3,
    num_query_groups=1,
    seq_length=8,
    vocab_size=47,
)
SAVED_AT = 5
STEPS = 25


def batch_of(step: int, ranks: int, rank: int) -> Batch:
    """This rank's rows of the global batch of 12 rows."""
    ids = torch.randint(MODEL.vocab_size, (12, 9), generator=torch.Generator().manual_seed(step))
    return whole_sequences(ids.chunk(ranks)[rank])


def trains(folder: str, stage: int, saves: bool, shard: int | None) -> dict[int, float]:
    """On one rank: train to the end, from the beginning (saving on the way) or from the checkpoint; global losses."""
    ranks = Ranks.from_environment()
    with join(ranks, "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(dp=group.size, dp_shard=shard), ranks.rank)
        decoder = Decoder(MODEL, torch.float32)
        initialize(decoder, 0 if saves else 99)
        sync = gradient_sync(
            decoder,
            mesh,
            Traffic(),
            zero_stage=stage,
            bucket_size_mb=0.004,
            blocks=list(decoder.blocks.values()),
        )
        optimizer = build_optimizer(sync.updated(), OptimizerConfig(lr=1e-2, fused=False))
        agreement = agreement_over(group)
        first = 1
        if not saves:
            path = Path(folder) / f"step-{SAVED_AT:08d}"
            loaded = load_checkpoint(path, MODEL, held_state(sync, optimizer), agreement=agreement)
            first = loaded.step + 1
        losses = {}
        for step in range(first, STEPS + 1):
            batch = batch_of(step, group.size, ranks.rank)
            with sync.micro_batch(last=True):
                loss = decoder.loss_sum(batch)
                (loss / (12 * batch.labels.shape[1])).backward()
            sync.finish()
            sync.step(optimizer)
            total = loss.detach().double()
            group.sum_(total)
            losses[step] = float(total)
            if saves and step == SAVED_AT:
                save_checkpoint(
                    Path(folder),
                    step,
                    model=MODEL,
                    state=held_state(sync, optimizer),
                    trainer_state={},
                    keep_latest_k=1,
                    agreement=agreement,
                )
    return losses


def after_the_save(losses: dict[int, float]) -> dict[int, float]:
    return {step: loss for step, loss in losses.items() if step > SAVED_AT}


Ways = tuple[int, int, int | None]
"""Ranks, ZeRO stage, ranks that share the shards."""


@pytest.mark.parametrize(
    "way",
    [
        (2, 2, None),
        (2, 3, None),
        *(pytest.param(way, marks=pytest.mark.long) for way in ((2, 0, None), (2, 1, None), (4, 3, 2))),
    ],
)
def test_the_next_twenty_losses_are_equal_to_the_bit_in_the_same_layout(way: Ways, tmp_path: Path) -> None:
    ranks, stage, shard = way
    (straight, *_) = on_kept_ranks(trains, ranks, str(tmp_path), stage, True, shard)
    (resumed, *_) = on_kept_ranks(trains, ranks, str(tmp_path), stage, False, shard)
    assert len(resumed) == 20
    assert resumed == after_the_save(straight)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 3, None), (1, 0, None)),
        ((1, 0, None), (2, 3, None)),
        ((2, 1, None), (4, 3, 2)),
        ((4, 3, 2), (2, 2, None)),
        ((3, 3, None), (2, 0, None)),
        ((2, 2, None), (3, 1, None)),
    ],
)
def test_the_next_twenty_losses_are_equal_up_to_round_off_in_another_layout(
    before: Ways, after: Ways, tmp_path: Path
) -> None:
    run: Callable[[Ways, bool], dict[int, float]] = lambda way, saves: on_kept_ranks(  # noqa: E731
        trains, way[0], str(tmp_path), way[1], saves, way[2]
    )[0]
    straight, resumed = run(before, True), run(after, False)
    assert len(resumed) == 20
    for step, loss in after_the_save(straight).items():
        assert resumed[step] == pytest.approx(loss, rel=1e-6), step
