"""Data parallelism over what tensor and pipeline parallelism have left: pairs and triples, against one process.

Stages hold a subset of the parameters, tensor parallelism cuts them, and the ZeRO stages share what is left. The norm
by which gradients are clipped counts every element once, whoever holds it.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from parity_cases import (
    MAX_NORM,
    OPTIMIZER,
    SEED,
    gpt,
    llama,
    micro_batches,
    reference,
    reference_training,
    valid_tokens,
    worst_difference,
)

from drivetrain.config import ModelConfig
from drivetrain.config.layout import Layout
from drivetrain.config.stages import Schedule, plan_stages
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initial_value
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.gradient_norm import clip_held_gradients
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline import Pipeline, decoder_of_rank
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.tensor_parallel import tensor_parallel
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks, on_ranks

CPU = torch.device("cpu")
STEPS = 3


@dataclass(frozen=True)
class Case:
    """A layout and what runs on it."""

    stage: int
    tp: int = 1
    pp: int = 1
    dp: int = 2
    shard: int | None = None
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"
    model: ModelConfig = field(default_factory=lambda: llama(4))
    micro_batches: int = 2
    each: bool = False
    compiled: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


UNTIED = llama(4, untied=True)
CASES = {
    **{f"tp2-dp2-zero{stage}": Case(stage, tp=2) for stage in (0, 1, 2, 3)},
    **{
        f"tp2-sp-dp2-zero{stage}-gpt": Case(stage, tp=2, sequence_parallel=True, model=gpt(2))
        for stage in (2, 3)
    },
    **{f"tp2-dp2-zero{stage}-each": Case(stage, tp=2, each=True) for stage in (1, 2, 3)},
    **{f"pp2-dp2-zero{stage}": Case(stage, pp=2) for stage in (0, 1, 2, 3)},
    **{
        f"pp2-dp2-zero{stage}-{schedule}": Case(stage, pp=2, schedule=schedule, model=UNTIED)
        for stage in (0, 2, 3)
        for schedule in ("interleaved_zero_bubble", "zbv")
    },
    **{
        f"pp2-dp2-zero{stage}-dualpipev": Case(
            stage, pp=2, schedule="dualpipev", model=UNTIED if stage == 3 else llama(4), micro_batches=4
        )
        for stage in (0, 1, 2, 3)
    },
    **{f"tp2-pp2-dp2-zero{stage}": Case(stage, tp=2, pp=2) for stage in (1, 2, 3)},
    "tp2-sp-pp2-dp2-zero3-interleaved": Case(
        3, tp=2, pp=2, sequence_parallel=True, schedule="interleaved_1f1b"
    ),
    **{
        f"tp2-dp4-hsdp2-zero{stage}": Case(stage, tp=2, dp=4, shard=2, micro_batches=1) for stage in (1, 2, 3)
    },
    **{f"pp2-dp4-hsdp2-zero{stage}": Case(stage, pp=2, dp=4, shard=2) for stage in (2, 3)},
    **{f"dp2-zero{stage}-compiled": Case(stage, compiled=True, model=llama(2)) for stage in (0, 2, 3)},
}


def train(case: Case) -> dict[str, Any]:
    """Three steps on this rank."""
    with join(Ranks.from_environment(), "cpu", 2.0) as group:
        layout = Layout(tp=case.tp, pp=case.pp, dp=case.dp, dp_shard=case.shard)
        mesh, traffic = Mesh.form(layout, group.ranks.rank), Traffic()
        plan = plan_stages(case.model.num_layers, case.pp, case.schedule, None, None) if case.pp > 1 else None
        decoder = (
            Decoder(case.model, torch.float64)
            if plan is None
            else decoder_of_rank(case.model, torch.float64, plan, mesh.index("pp"), CPU)
        )
        placements = tensor_parallel(decoder, mesh, case.sequence_parallel, traffic)
        pipeline = None
        if plan is not None:
            shards = case.tp if case.sequence_parallel else 1
            pipeline = Pipeline(decoder, plan, case.schedule, mesh, CPU, traffic, sequence_shards=shards)
            placements = pipeline.placements(placements)
        sync = gradient_sync(
            decoder,
            mesh,
            traffic,
            zero_stage=case.stage,
            placements=placements,
            bucket_size_mb=0.004,
            reduce_each_micro_batch=case.each,
            blocks=list(decoder.blocks.values()),
            stages=[(part, list(part.blocks.values())) for part in pipeline.modules] if pipeline else (),
        )
        with torch.no_grad():
            for name, held in sync.parameters().items():
                whole = initial_value(case.model, name, held.placement.full_shape, SEED)
                held.tensor.copy_(whole[held.placement.slices()])
        if case.compiled:
            decoder.compile_blocks("aot_eager")
        optimizer = build_optimizer(sync.updated(), OPTIMIZER)
        gradients: dict[str, np.ndarray] = {}
        norms = []
        for step in range(STEPS):
            batches = micro_batches(case.model, case.micro_batches, mesh.index("dp"), case.dp, step)
            total = valid_tokens(case.model, step)
            if pipeline is not None:
                with sync.micro_batch(last=False):
                    pipeline.run(batches, total)
            else:
                for number, batch in enumerate(batches):
                    with sync.micro_batch(last=number == len(batches) - 1):
                        (decoder.loss_sum(batch) / total).backward()
            sync.finish()
            if step == 0:
                gradients = {name: held.tensor.numpy().copy() for name, held in sync.gradients().items()}
            norm, _ = clip_held_gradients(sync.gradients(), MAX_NORM, mesh, traffic)
            norms.append(float(norm))
            sync.step(optimizer)
        parameters = sync.parameters()
        return {
            "gradients": gradients,
            "placements": dict(sync.placements()),
            "norms": norms,
            "parameters": {name: held.tensor.numpy().copy() for name, held in parameters.items()},
            "parameter_placements": {name: held.placement for name, held in parameters.items()},
        }


def seen(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Without the biases of keys: AdamW makes something of their round-off."""
    return {name: value for name, value in values.items() if not name.endswith("attention.key.bias")}


SHORT = {"tp2-dp2-zero1", "pp2-dp2-zero2", "tp2-pp2-dp2-zero1", "tp2-pp2-dp2-zero3", "tp2-dp4-hsdp2-zero2"}
"""Each pair and a few triples; the other layouts take minutes."""


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_a_layout_trains_as_one_process(name: str) -> None:
    case = CASES[name]
    _, gradients = reference(case.model)
    _, parameters = reference_training(case.model, STEPS)
    found = (on_ranks if case.compiled else on_kept_ranks)(train, case.ranks, case, timeout=600)
    assert worst_difference([(rank["gradients"], rank["placements"]) for rank in found], gradients) < 1e-9
    per_rank = [(seen(rank["parameters"]), rank["parameter_placements"]) for rank in found]
    assert worst_difference(per_rank, seen(parameters)) < 1e-9
    norm = float(np.sqrt(sum(np.linalg.norm(value) ** 2 for value in gradients.values())))
    for rank in found:
        assert rank["norms"][0] == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_a_tied_embedding_with_both_ends_on_one_rank_is_refused_at_stage_three(schedule: Schedule) -> None:
    with pytest.raises(AssertionError, match="two stages of this rank share a parameter"):
        on_kept_ranks(train, 4, Case(3, pp=2, schedule=schedule, micro_batches=4))
