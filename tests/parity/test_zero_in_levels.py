"""ZeRO stages 0 to 3 whose collectives go in levels, against the same ranks with flat collectives."""

from typing import Any

import numpy as np
import pytest
import torch
from parity_cases import OPTIMIZER, llama, micro_batches, reference_decoder, valid_tokens

from drivetrain.config.layout import Layout
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

MODEL = llama(hidden_size=18, ffn_hidden_size=23, num_attention_heads=3, num_query_groups=1, vocab_size=47)
RANKS, PER_HOST, STEPS = 4, 2, 2

Result = dict[str, Any]


def train(stage: int, per_host: int | None, each: bool, wire_dtype: torch.dtype | None = None) -> Result:
    """Gradients of the first step, parameters after the last, and what travelled."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(dp=RANKS), group.ranks.rank)
        if per_host is not None:
            mesh = mesh.in_levels(per_host, torch.device("cpu"))
        decoder, traffic = reference_decoder(MODEL), Traffic()
        sync = gradient_sync(
            decoder,
            mesh,
            traffic,
            zero_stage=stage,
            bucket_size_mb=0.004,
            reduce_each_micro_batch=each,
            wire_dtype=wire_dtype,
            blocks=list(decoder.blocks.values()),
        )
        optimizer = build_optimizer(sync.updated(), OPTIMIZER)
        gradients: dict[str, np.ndarray] = {}
        for step in range(STEPS):
            batches = micro_batches(MODEL, 2, mesh.index("dp"), RANKS, step)
            for number, batch in enumerate(batches):
                with sync.micro_batch(last=number == len(batches) - 1):
                    (decoder.loss_sum(batch) / valid_tokens(MODEL, step)).backward()
            sync.finish()
            if step == 0:
                gradients = {name: held.tensor.numpy().copy() for name, held in sync.gradients().items()}
            sync.step(optimizer)
        return {
            "gradients": gradients,
            "parameters": {name: held.tensor.numpy().copy() for name, held in sync.parameters().items()},
            "bytes": traffic.bytes_by_group(),
        }


def worst(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert found.keys() == expected.keys()
    return max(
        float(np.linalg.norm(found[name] - one) / max(np.linalg.norm(one), 1e-6))
        for name, one in expected.items()
    )


@pytest.mark.parametrize(
    ("stage", "each"),
    [(0, False), (2, True), *(pytest.param(stage, False, marks=pytest.mark.long) for stage in (1, 2, 3))],
)
def test_training_in_levels_is_training(stage: int, each: bool) -> None:
    in_levels = on_kept_ranks(train, RANKS, stage, PER_HOST, each)
    flat = on_kept_ranks(train, RANKS, stage, None, each)
    for ours, theirs in zip(in_levels, flat, strict=True):
        assert worst(ours["gradients"], theirs["gradients"]) < 1e-12
        # AdamW divides by the root of a square: of a small gradient that magnifies round-off.
        assert worst(ours["parameters"], theirs["parameters"]) < 1e-9
        levels = {name for name in ours["bytes"] if name.endswith(("_host", "_across"))}
        assert levels, "nothing went in levels"
        assert not {"dp", "dp_shard"} & ours["bytes"].keys()
        assert not any(name.endswith(("_host", "_across")) for name in theirs["bytes"])


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_that_travel_in_16_bits_do_so_between_machines_too(stage: int) -> None:
    narrow = on_kept_ranks(train, RANKS, stage, PER_HOST, False, torch.bfloat16)
    whole = on_kept_ranks(train, RANKS, stage, PER_HOST, False)
    flat = on_kept_ranks(train, RANKS, stage, None, False)
    for ours, theirs, plain in zip(narrow, whole, flat, strict=True):
        # Rounded for the first level, and the sum of a machine for the second (2^-8 each); values partly cancel.
        assert 1e-4 < worst(ours["gradients"], plain["gradients"]) < 5e-2
        reduced = "dp" if stage == 0 else "dp_shard"
        # 2 bytes instead of 8 of what is summed; parameters are gathered as before.
        assert ours["bytes"][f"{reduced}_across"] < theirs["bytes"][f"{reduced}_across"]
        if stage == 0:
            # The halves of a sum hand over all of it and then a half of it, an all-reduce all of it once; on the wire
            # both send as much. Padding is of a few elements a bucket.
            assert ours["bytes"]["dp_across"] <= 1.5 * theirs["bytes"]["dp_across"] / 4 * 1.02
