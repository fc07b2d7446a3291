"""Losses and gradients of a pipeline equal those of one process, under every schedule, and so do its bytes.

Every micro-batch has another packing of documents and another number of valid tokens (one has none), so that data
looked up under a wrong number, or a mean in place of a sum, cannot pass.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import parity_cases as cases
from drivetrain.config import ModelConfig
from drivetrain.config.layout import Layout
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline import Pipeline, decoder_of_rank, payload_bytes
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.stages import Schedule, StagePlan, plan_stages
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_ranks

CPU = torch.device("cpu")
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
LIMIT = 1e-9


@dataclass(frozen=True)
class Case:
    """A model and how it is cut."""

    model: ModelConfig
    schedule: Schedule = "1f1b"
    pp: int = 2
    dp: int = 1
    virtual: int | None = None
    layers: tuple[int, ...] | None = None
    num_microbatches: int = 4

    @property
    def plan(self) -> StagePlan:
        return plan_stages(self.model.num_layers, self.pp, self.schedule, self.virtual, self.layers)


@dataclass
class Found:
    """What a rank has at the end of a step."""

    loss: float
    gradients: dict[str, np.ndarray]
    placements: Mapping[str, Placement]
    bytes: dict[tuple[str, str], int] = field(default_factory=dict)


@contextmanager
def pipeline_of(
    case: Case, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[Decoder, Pipeline, Mesh]]:
    """This rank's part of the model, with the weights every layout starts from."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(pp=case.pp, dp=case.dp), group.ranks.rank)
        decoder = decoder_of_rank(case.model, dtype, case.plan, mesh.index("pp"), CPU)
        initialize(decoder, cases.SEED)
        yield decoder, Pipeline(decoder, case.plan, case.schedule, mesh, CPU, Traffic()), mesh


def step(case: Case, decoder: Decoder, pipeline: Pipeline, mesh: Mesh, number: int = 0) -> Found:
    """One step: the schedule, then the sum over data-parallel ranks."""
    batches = cases.micro_batches(case.model, case.num_microbatches, mesh.index("dp"), case.dp, number)
    total = cases.valid_tokens(case.model, number)
    pipeline.traffic.take()
    loss = pipeline.run(batches, total)
    counted = {key: count.bytes for key, count in pipeline.traffic.take().items()}
    if case.dp > 1:
        dist.all_reduce(loss, group=mesh.group("dp"))
        for parameter in decoder.parameters():
            dist.all_reduce(parameter.grad, group=mesh.group("dp"))
    whole = {name: Placement(tuple(p.shape)) for name, p in decoder.named_parameters()}
    placements = pipeline.placements(whole)
    return Found(loss.item() / total, cases.gradients_of(decoder), placements, counted)


def one_step(case: Case, sabotage: Callable[[Pipeline], None] | None = None) -> Found:
    with pipeline_of(case) as (decoder, pipeline, mesh):
        if sabotage is not None:
            sabotage(pipeline)
        return step(case, decoder, pipeline, mesh)


def worst(found: list[Found], case: Case) -> float:
    """Largest difference of a gradient on any rank; losses are equal or this fails."""
    loss, gradients = cases.reference(case.model)
    for rank in found:
        assert rank.loss == pytest.approx(loss, rel=1e-12)
    return cases.worst_difference([(rank.gradients, rank.placements) for rank in found], gradients)


def expected_bytes(case: Case, rank: int) -> Mapping[tuple[str, str], int]:
    """By the closed form, in fp64."""
    first, last = case.plan.ranks_of_ends
    tied = not case.model.untie_embeddings_and_output_weights and first != last
    tokens = cases.ROWS // case.num_microbatches // case.dp * case.model.seq_length
    return payload_bytes(
        case.plan,
        rank,
        case.num_microbatches,
        hidden_bytes=8 * tokens * case.model.hidden_size,
        tied_bytes=8 * case.model.vocab_size * case.model.hidden_size * tied,
        loss_bytes=8,
    )


MATRIX = {
    **{f"{name}-pp2-llama": Case(cases.llama(4), name) for name in SCHEDULES},
    **{f"{name}-pp2-gpt": Case(cases.gpt(4), name) for name in SCHEDULES},
    "1f1b-pp4-gpt": Case(cases.gpt(4), pp=4),
    "1f1b-pp4-llama-untied-8-micro-batches": Case(cases.llama(5, untied=True), pp=4, num_microbatches=8),
    "interleaved_1f1b-pp4-llama": Case(cases.llama(8), "interleaved_1f1b", pp=4, num_microbatches=8),
    "zbv-pp4-gpt": Case(cases.gpt(8), "zbv", pp=4),
    "interleaved_zero_bubble-pp4-llama-untied": Case(
        cases.llama(8, untied=True), "interleaved_zero_bubble", pp=4
    ),
    "1f1b-pp2-uneven-by-default": Case(cases.llama(3)),
    "1f1b-pp2-layout-1-3": Case(cases.gpt(4), layers=(1, 3)),
    "gpipe-pp2-fewer-micro-batches-than-ranks": Case(cases.llama(2), "gpipe", num_microbatches=1),
    "interleaved_1f1b-pp2-three-virtual-stages": Case(cases.llama(6), "interleaved_1f1b", virtual=3),
    "interleaved_1f1b-pp2-layout-3-1-2-1": Case(cases.llama(7), "interleaved_1f1b", layers=(3, 1, 2, 1)),
    "interleaved_zero_bubble-pp2-embedding-and-loss-alone": Case(
        cases.gpt(4), "interleaved_zero_bubble", layers=(0, 3, 1, 0)
    ),
    "zbv-pp2-untied-qk-norm-loss-alone": Case(
        cases.llama(5, untied=True, qk_norm=True), "zbv", layers=(1, 3, 1, 0)
    ),
    "1f1b-pp2-dp2-tied": Case(cases.gpt(2), dp=2, num_microbatches=2),
    "zbv-pp2-dp2": Case(cases.llama(4), "zbv", dp=2),
}


@pytest.mark.parametrize("case", MATRIX.values(), ids=MATRIX.keys())
def test_gradients_and_loss_equal_one_process(case: Case) -> None:
    found = on_ranks(one_step, case.pp * case.dp, case)
    assert worst(found, case) < LIMIT
    ranks = Layout(pp=case.pp, dp=case.dp)
    for rank, there in enumerate(found):
        assert there.bytes == expected_bytes(case, ranks.coordinates(rank)["pp"])
