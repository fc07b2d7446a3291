"""Stage 3 with blocks that are gathered ahead and gradients that travel behind: the same bits, the same traffic."""

from typing import Any

import numpy as np
import pytest
import torch
from parity_cases import OPTIMIZER, llama, micro_batches, valid_tokens

from drivetrain.config.layout import Layout
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

BLOCKS, STEPS = 4, 2
MODEL = llama(BLOCKS, hidden_size=18, num_attention_heads=3, num_query_groups=1, vocab_size=47)
GATHER = ("dp_shard", "all_gather")


def train(prefetch: int, each: bool = False, shard: int | None = None) -> dict[str, Any]:
    """Gradients, losses, traffic; gathers that were handed over when each block began, and sums that were still under
    way when backward had ended."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh, traffic = Mesh.form(Layout(dp=group.size, dp_shard=shard), group.ranks.rank), Traffic()
        decoder = Decoder(MODEL, torch.float64)
        initialize(decoder, 3)
        sync = gradient_sync(
            decoder,
            mesh,
            traffic,
            zero_stage=3,
            reduce_each_micro_batch=each,
            prefetch_blocks=prefetch,
            blocks=list(decoder.blocks.values()),
        )
        gathers: list[int] = []
        for block in decoder.blocks.values():
            # Behind FSDP2's own, so that a block's gathers are there.
            block.register_forward_pre_hook(lambda *_: gathers.append(traffic.counts[GATHER].calls))
        optimizer = build_optimizer(sync.updated(), OPTIMIZER)
        gradients, losses, travelled, behind = [], [], [], []
        for step in range(STEPS):
            for number, batch in enumerate(micro_batches(MODEL, 2, mesh.index("dp"), group.size, step)):
                with sync.micro_batch(last=number == 1):
                    loss = decoder.loss_sum(batch)
                    (loss / valid_tokens(MODEL, step)).backward()
                losses.append(loss.item())
            behind.append(len(sync._reduction._under_way))  # type: ignore[attr-defined]
            sync.finish()
            gradients.append({name: held.tensor.numpy().copy() for name, held in sync.gradients().items()})
            sync.step(optimizer)
            travelled.append({key: (count.calls, count.bytes) for key, count in traffic.take().items()})
        with torch.no_grad():
            losses.append(decoder.loss_sum(micro_batches(MODEL, 1)[0]).item())
        parameters = {name: held.tensor.numpy().copy() for name, held in sync.parameters().items()}
        return {
            "gradients": gradients,
            "losses": losses,
            "travelled": travelled,
            "parameters": parameters,
            "gathers": gathers,
            "behind": behind,
        }


@pytest.mark.parametrize(
    ("prefetch", "each", "ranks", "shard"),
    [
        (1, False, 2, None),
        (2, True, 2, None),
        pytest.param(9, False, 2, None, marks=pytest.mark.long),
        pytest.param(1, False, 4, 2, marks=pytest.mark.long),
    ],
)
def test_gathers_ahead_and_sums_behind_change_no_bit_and_no_traffic(
    prefetch: int, each: bool, ranks: int, shard: int | None
) -> None:
    plain = on_kept_ranks(train, ranks, 0, each, shard)
    ahead = on_kept_ranks(train, ranks, prefetch, each, shard)
    for one, other in zip(plain, ahead, strict=True):
        assert other["losses"] == one["losses"]
        assert other["travelled"] == one["travelled"]
        for step in range(STEPS):
            for name, value in one["gradients"][step].items():
                assert np.array_equal(other["gradients"][step][name], value), (step, name)
        for name, value in one["parameters"].items():
            assert np.array_equal(other["parameters"][name], value), name
        assert one["behind"] == [0] * STEPS
        # Sums of several micro-batches, and over replicas, are made of the result at once.
        may_wait = not each and shard is None
        assert all(count > 0 for count in other["behind"]) == may_wait


@pytest.mark.parametrize(("prefetch", "ahead"), [(0, [0, 0, 0, 0]), (1, [1, 1, 1, 0]), (2, [2, 2, 1, 0])])
def test_a_block_begins_when_those_after_it_were_asked_for(prefetch: int, ahead: list[int]) -> None:
    for rank in on_kept_ranks(train, 2, prefetch):
        # The root is gathered first, then each block.
        used = [2 + place for place in range(BLOCKS)]
        found = rank["gathers"][:BLOCKS]
        assert [one - other for one, other in zip(found, used, strict=True)] == ahead
