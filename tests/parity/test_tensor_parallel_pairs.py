"""Tensor parallelism inside data parallelism (every ZeRO stage) and inside pipeline stages (every schedule)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import parity_cases as cases
import pytest
import torch
import torch.distributed as dist
from test_tensor_parallel import MODELS, with_random_vectors

from drivetrain.config import ModelConfig
from drivetrain.config.layout import Layout
from drivetrain.config.stages import Schedule, plan_stages
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.gradient_norm import norm_of_held
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline import Pipeline, decoder_of_rank
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.tensor_parallel import tensor_parallel
from drivetrain.engine.parallel.tensor_parallel_bytes import tensor_parallel_bytes
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

CPU = torch.device("cpu")
MICRO_BATCHES = 4
ZERO_STAGES = (0, 1, 2, 3)
DATA_PARALLEL_MODELS = ("llama_bias", "gpt")
PIPELINES: dict[Schedule, ModelConfig] = {
    "gpipe": cases.gpt(4),
    "1f1b": cases.llama(3, num_query_groups=1),
    "interleaved_1f1b": cases.gpt(4),
    "interleaved_zero_bubble": cases.llama(4, qk_norm=True, num_query_groups=1),
    "zbv": cases.gpt(4),
    "dualpipev": cases.llama(4, qk_norm=True),
}


@dataclass
class Found:
    """What one rank has at the end of a step."""

    loss: float
    gradients: dict[str, np.ndarray]
    placements: Mapping[str, Placement]
    tp_bytes: dict[str, int]
    norm: float | None = None


@cache
def on_four_ranks(matrix: Callable[[], Any]) -> list[Any]:
    """All cases of a layout: processes are started once."""
    return on_kept_ranks(matrix, 4)


def reference(model: ModelConfig) -> tuple[float, dict[str, np.ndarray]]:
    decoder = with_random_vectors(cases.reference_decoder(model))
    batch = cases.rows_of_global_batch(model, range(cases.ROWS))
    loss = decoder.loss_sum(batch) / batch.num_valid_tokens
    loss.backward()
    return loss.item(), cases.gradients_of(decoder)


def check(found: list[Found], model: ModelConfig) -> None:
    loss, gradients = reference(model)
    for rank in found:
        assert rank.loss == pytest.approx(loss, rel=1e-12)
    assert cases.worst_difference([(rank.gradients, rank.placements) for rank in found], gradients) < 1e-9


def bytes_of_tp(traffic: Traffic) -> dict[str, int]:
    return {kind: count.bytes for (group, kind), count in traffic.counts.items() if group == "tp"}


def data_parallel_step(model: ModelConfig, mesh: Mesh, zero_stage: int, sequence_parallel: bool) -> Found:
    decoder = with_random_vectors(cases.reference_decoder(model))
    traffic = Traffic()
    placements = tensor_parallel(decoder, mesh, sequence_parallel, traffic)
    sync = gradient_sync(
        decoder,
        mesh,
        traffic,
        zero_stage=zero_stage,
        placements=placements,
        bucket_size_mb=0.004,
        blocks=list(decoder.blocks.values()),
    )
    total = cases.valid_tokens(model)
    loss = torch.zeros((), dtype=torch.float64)
    batches = cases.micro_batches(model, 2, mesh.index("dp"), 2)
    for number, batch in enumerate(batches):
        with sync.micro_batch(last=number == len(batches) - 1):
            part = decoder.loss_sum(batch) / total
            part.backward()
        loss += part.detach()
    sync.finish()
    dist.all_reduce(loss, group=mesh.group("dp"))
    sent = bytes_of_tp(traffic)
    held = sync.gradients()
    norm = norm_of_held(held, mesh, traffic).item()
    gradients = {name: one.tensor.detach().numpy().copy() for name, one in held.items()}
    return Found(loss.item(), gradients, {name: one.placement for name, one in held.items()}, sent, norm)


def data_parallel_matrix() -> dict[tuple[str, int, bool], Found]:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(tp=2, dp=2), group.ranks.rank)
        return {
            case: data_parallel_step(MODELS[case[0]], mesh, *case[1:])
            for case in product(DATA_PARALLEL_MODELS, ZERO_STAGES, (False, True))
        }


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp_sp"])
@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
@pytest.mark.parametrize("name", DATA_PARALLEL_MODELS)
def test_data_parallel_ranks_of_tensor_parallel_ranks(
    name: str, zero_stage: int, sequence_parallel: bool
) -> None:
    model = MODELS[name]
    found = [rank[name, zero_stage, sequence_parallel] for rank in on_four_ranks(data_parallel_matrix)]
    check(found, model)
    norm = np.sqrt(sum(np.linalg.norm(value) ** 2 for value in reference(model)[1].values()))
    for rank in found:
        assert rank.norm == pytest.approx(norm, rel=1e-9)
    expected = tensor_parallel_bytes(
        model,
        2,
        sequence_parallel=sequence_parallel,
        tokens=cases.ROWS // 4 * model.seq_length,
        compute_dtype=torch.float64,
        parameter_dtype=torch.float64,
    )
    for rank in found:
        assert rank.tp_bytes == {kind: 2 * count for kind, count in expected.items()}


def pipeline_step(mesh: Mesh, schedule: Schedule, sequence_parallel: bool) -> Found:
    model = PIPELINES[schedule]
    plan = plan_stages(model.num_layers, 2, schedule, None, None)
    decoder = decoder_of_rank(model, torch.float64, plan, mesh.index("pp"), CPU)
    initialize(decoder, cases.SEED)
    with_random_vectors(decoder)
    traffic = Traffic()
    placements = tensor_parallel(decoder, mesh, sequence_parallel, traffic)
    pipeline = Pipeline(
        decoder, plan, schedule, mesh, CPU, traffic, sequence_shards=2 if sequence_parallel else 1
    )
    total = cases.valid_tokens(model)
    loss = pipeline.run(cases.micro_batches(model, MICRO_BATCHES), total).item() / total
    gradients = cases.gradients_of(decoder)
    return Found(loss, gradients, pipeline.placements(placements), bytes_of_tp(traffic))


def pipeline_matrix() -> dict[tuple[Schedule, bool], Found]:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(tp=2, pp=2), group.ranks.rank)
        return {case: pipeline_step(mesh, *case) for case in product(PIPELINES, (False, True))}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp_sp"])
@pytest.mark.parametrize("schedule", PIPELINES)
def test_pipeline_stages_of_tensor_parallel_ranks(schedule: Schedule, sequence_parallel: bool) -> None:
    model = PIPELINES[schedule]
    found = [rank[schedule, sequence_parallel] for rank in on_four_ranks(pipeline_matrix)]
    check(found, model)
    plan = plan_stages(model.num_layers, 2, schedule, None, None)
    for rank, one in enumerate(found):
        stage_rank = rank // 2
        expected = tensor_parallel_bytes(
            model,
            2,
            sequence_parallel=sequence_parallel,
            tokens=cases.ROWS // MICRO_BATCHES * model.seq_length,
            compute_dtype=torch.float64,
            parameter_dtype=torch.float64,
            layers=len(plan.layers_on(stage_rank)),
            first=stage_rank == plan.ranks_of_ends[0],
            last=stage_rank == plan.ranks_of_ends[1],
        )
        assert one.tp_bytes == {kind: MICRO_BATCHES * count for kind, count in expected.items()}
