"""Updated parameters that travel behind the step (ZeRO 1, 2) change no bit, and nobody reads them before they come."""

from typing import Any

import numpy as np
import pytest
import torch
from parity_cases import OPTIMIZER, llama, micro_batches, valid_tokens
from torch import nn

from drivetrain.config.layout import Layout
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks, on_ranks

STEPS = 3
MODEL = llama(3, untied=True, hidden_size=18, num_attention_heads=3, num_query_groups=1, vocab_size=95)
"""An embedding and an output matrix of 6,840 bytes each fill a bucket of their own."""


class Untold(nn.Module):
    """A decoder that says nothing of what it reads."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.inner = decoder

    def loss_sum(self, batch: Any) -> torch.Tensor:
        return self.inner.loss_sum(batch)


def train(
    stage: int, overlap: bool, shard: int | None = None, told: bool = True, compiled: bool = False
) -> dict[str, Any]:
    """Losses, final parameters, the traffic of each step, and the buckets under way as each part is used."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(dp=group.size, dp_shard=shard), group.ranks.rank)
        decoder = Decoder(MODEL, torch.float32)
        initialize(decoder, 3)
        sync = gradient_sync(
            decoder if told else Untold(decoder),
            mesh,
            Traffic(),
            zero_stage=stage,
            bucket_size_mb=0.004,
            overlap_param_gather=overlap,
        )
        if compiled:
            decoder.compile_blocks("aot_eager")
        optimizer = build_optimizer(sync.updated(), OPTIMIZER)
        behind = sync._behind  # type: ignore[attr-defined]
        under_way: list[int] = []
        if not compiled:
            for block in decoder.blocks.values():
                block.register_forward_pre_hook(
                    lambda *_: under_way.append(len(behind._travelling)) if behind is not None else None
                )
        losses, travelled = [], []
        for step in range(STEPS):
            for number, batch in enumerate(micro_batches(MODEL, 2, mesh.index("dp"), group.size, step)):
                with sync.micro_batch(last=number == 1):
                    loss = decoder.loss_sum(batch)
                    (loss / valid_tokens(MODEL, step)).backward()
                losses.append(loss.item())
            sync.finish()
            sync.step(optimizer)
            travelled.append({key: (count.calls, count.bytes) for key, count in sync.traffic.take().items()})
        with torch.no_grad():
            # An evaluation between steps, while everything is still under way.
            losses.append(decoder.loss_sum(micro_batches(MODEL, 1)[0]).item())
        return {
            "losses": losses,
            "travelled": travelled,
            "under_way": under_way,
            "parameters": {name: held.tensor.numpy().copy() for name, held in sync.parameters().items()},
            "left": 0 if behind is None else len(behind._travelling),
            "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        }


@pytest.mark.parametrize(
    ("stage", "shard", "ranks", "told"),
    [
        (1, None, 2, True),
        (2, None, 2, True),
        (2, None, 2, False),
        pytest.param(1, 2, 4, True, marks=pytest.mark.long),
        pytest.param(2, 2, 4, True, marks=pytest.mark.long),
    ],
)
def test_parameters_that_travel_behind_the_step_change_no_bit(
    stage: int, shard: int | None, ranks: int, told: bool
) -> None:
    plain = on_kept_ranks(train, ranks, stage, False, shard)
    behind = on_kept_ranks(train, ranks, stage, True, shard, told)
    for one, other in zip(plain, behind, strict=True):
        assert other["losses"][:-1] == one["losses"][:-1]
        if told:
            assert other["losses"][-1] == one["losses"][-1], "an evaluation read what had not arrived"
        assert other["travelled"] == one["travelled"]
        for name, value in one["parameters"].items():
            assert np.array_equal(other["parameters"][name if told else f"inner.{name}"], value), name
        assert other["left"] == 0, "asking for the parameters waits for them"


def test_a_block_waits_for_its_own_parameters_and_not_for_those_behind_it() -> None:
    for rank in on_kept_ranks(train, 2, 1, True):
        first, *later = [rank["under_way"][6 * step : 6 * step + 6] for step in range(STEPS)]
        assert first == [0] * 6, "nothing was updated yet"
        for step in later:
            forward, again = step[:3], step[3:]
            assert forward[0] > forward[1] > forward[2] > 0, "the output matrix comes last"
            assert again == [0, 0, 0], "the second micro-batch finds everything"


def test_a_module_that_does_not_say_what_it_reads_waits_for_all() -> None:
    for rank in on_kept_ranks(train, 2, 2, True, None, False):
        assert set(rank["under_way"][: 6 * STEPS]) == {0}


@pytest.mark.long
def test_waiting_for_parameters_breaks_no_graph_of_compiled_blocks() -> None:
    plain = on_ranks(train, 2, 1, False, None, True, True)
    behind = on_ranks(train, 2, 1, True, None, True, True)
    for one, other in zip(plain, behind, strict=True):
        assert other["losses"] == one["losses"]
        assert other["graph_breaks"] == one["graph_breaks"]
