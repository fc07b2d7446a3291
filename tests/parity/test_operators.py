"""Operators of the registry inside tensor parallelism, sharded data parallelism and pipelines, zero-bubble ones too."""

from typing import Any

import parity_cases as cases
import pytest
import torch
import torch.distributed as dist
from test_tensor_parallel import MODELS, with_random_vectors
from test_tensor_parallel_pairs import CPU, MICRO_BATCHES, PIPELINES, Found, check, on_four_ranks

from drivetrain.config import operator_fields
from drivetrain.config.layout import Layout
from drivetrain.config.stages import Schedule, plan_stages
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline import Pipeline, decoder_of_rank
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.tensor_parallel import tensor_parallel
from drivetrain.engine.parallel.traffic import Traffic

REQUESTED = {
    **dict.fromkeys(operator_fields(), "eager"),
    # Those of several outputs and gradients of their own, in float64.
    "qkv_product": "joined",
    "gate_up_product": "joined",
    "linear_cross_entropy": "chunked",
    "attention": "chunked",
}
SHARDED = [("llama", 3, True), ("llama", 1, False), ("gpt", 2, True)]
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")


def serve(decoder: Decoder) -> Selection:
    selection = Selection(dict(REQUESTED))
    decoder.use_operators(selection)
    return selection


def sharded_step(name: str, zero_stage: int, sequence_parallel: bool, mesh: Mesh) -> tuple[Found, set[str]]:
    model, traffic = MODELS[name], Traffic()
    decoder = with_random_vectors(cases.reference_decoder(model))
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
    selection = serve(decoder)
    total, loss = cases.valid_tokens(model), torch.zeros((), dtype=torch.float64)
    batches = cases.micro_batches(model, 2, mesh.index("dp"), 2)
    for number, batch in enumerate(batches):
        with sync.micro_batch(last=number == len(batches) - 1):
            part = decoder.loss_sum(batch) / total
            part.backward()
        loss += part.detach()
    sync.finish()
    dist.all_reduce(loss, group=mesh.group("dp"))
    held = sync.gradients()
    gradients = {name: one.tensor.detach().numpy().copy() for name, one in held.items()}
    found = Found(loss.item(), gradients, {name: one.placement for name, one in held.items()}, {})
    return found, {operator for operator, _ in selection.served}


def sharded_matrix() -> dict[Any, tuple[Found, set[str]]]:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(tp=2, dp=2), group.ranks.rank)
        return {case: sharded_step(*case, mesh) for case in SHARDED}


@pytest.mark.parametrize(("name", "zero_stage", "sequence"), SHARDED)
def test_sharded_ranks_of_tensor_parallel_ranks_compute_by_operators_what_one_process_does(
    name: str, zero_stage: int, sequence: bool
) -> None:
    per_rank = [rank[name, zero_stage, sequence] for rank in on_four_ranks(sharded_matrix)]
    check([found for found, _ in per_rank], MODELS[name])
    for _, served in per_rank:
        norms = {"rms_norm", "add_rms_norm"} if name == "llama" else {"layer_norm", "add_layer_norm"}
        assert served >= {*norms, "attention", "linear"}
        assert "linear_cross_entropy" not in served, "the vocabulary is spread: its loss has code of its own"


def pipeline_step(schedule: Schedule, mesh: Mesh) -> tuple[Found, set[str]]:
    model, traffic = PIPELINES[schedule], Traffic()
    plan = plan_stages(model.num_layers, 2, schedule, None, None)
    decoder = decoder_of_rank(model, torch.float64, plan, mesh.index("pp"), CPU)
    initialize(decoder, cases.SEED)
    with_random_vectors(decoder)
    selection = serve(decoder)
    pipeline = Pipeline(decoder, plan, schedule, mesh, CPU, traffic)
    total = cases.valid_tokens(model)
    loss = pipeline.run(cases.micro_batches(model, MICRO_BATCHES), total).item() / total
    whole = {name: Placement(tuple(value.shape)) for name, value in decoder.named_parameters()}
    found = Found(loss, cases.gradients_of(decoder), pipeline.placements(whole), {})
    return found, {operator for operator, _ in selection.served}


def pipeline_matrix() -> dict[Schedule, tuple[Found, set[str]]]:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(pp=2, dp=2), group.ranks.rank)
        return {schedule: pipeline_step(schedule, mesh) for schedule in SCHEDULES}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelines_that_split_backward_compute_by_operators_what_one_process_does(schedule: Schedule) -> None:
    per_rank = [rank[schedule] for rank in on_four_ranks(pipeline_matrix)]
    check([found for found, _ in per_rank], PIPELINES[schedule])
    ends = set().union(*(served for _, served in per_rank))
    assert "linear_cross_entropy" in ends
