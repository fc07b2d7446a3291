"""Losses and gradients of a pipeline equal those of one process, under every schedule, and so do its bytes.

Every micro-batch has another packing of documents and another number of valid tokens (one has none), so that data
looked up under a wrong number, or a mean in place of a sum, cannot pass.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import parity_cases as cases
import pytest
import torch
import torch.distributed as dist

from drivetrain.config import ModelConfig
from drivetrain.config.layout import Layout
from drivetrain.config.stages import V_SHAPED, Schedule, StagePlan, legal_micro_batches, plan_stages
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.fully_sharded import FullySharded
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline import Pipeline, decoder_of_rank, payload_bytes
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.errors import DataError
from rank_processes import on_kept_ranks, on_ranks

CPU = torch.device("cpu")
SCHEDULES: tuple[Schedule, ...] = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
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
def pipeline_of(case: Case, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Decoder, Pipeline, Mesh]]:
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
    "1f1b-pp2-untied-dp2": Case(cases.llama(2, untied=True), dp=2),
    "zbv-pp2-dp2": Case(cases.llama(4), "zbv", dp=2),
    "dualpipev-pp3-gpt-more-micro-batches-than-stages": Case(
        cases.gpt(6), "dualpipev", pp=3, num_microbatches=8
    ),
    "dualpipev-pp4-llama": Case(cases.llama(8), "dualpipev", pp=4, num_microbatches=8),
    "dualpipev-pp2-untied-qk-norm-loss-alone": Case(
        cases.llama(5, untied=True, qk_norm=True), "dualpipev", layers=(1, 3, 1, 0)
    ),
    "dualpipev-pp2-dp2": Case(cases.llama(4), "dualpipev", dp=2),
}


@pytest.mark.parametrize("case", MATRIX.values(), ids=MATRIX.keys())
def test_gradients_and_loss_equal_one_process(case: Case) -> None:
    found = on_kept_ranks(one_step, case.pp * case.dp, case)
    assert worst(found, case) < LIMIT
    ranks = Layout(pp=case.pp, dp=case.dp)
    for rank, there in enumerate(found):
        assert there.bytes == expected_bytes(case, ranks.coordinates(rank)["pp"])


def test_fp32_stays_within_round_off() -> None:
    case = Case(cases.llama(4), "interleaved_1f1b")
    found = on_kept_ranks(one_step_in_fp32, 2, case)
    _, gradients = cases.reference(case.model, torch.float32)
    difference = cases.worst_difference([(rank.gradients, rank.placements) for rank in found], gradients)
    assert 0 < difference < 1e-5


def one_step_in_fp32(case: Case) -> Found:
    with pipeline_of(case, torch.float32) as (decoder, pipeline, mesh):
        return step(case, decoder, pipeline, mesh)


# Mutations: a matrix that cannot turn red proves nothing.


class Swapped:
    """The first two micro-batches under each other's number."""

    def __init__(self, feed: Any) -> None:
        self.feed = feed

    def __getitem__(self, index: int) -> Batch:
        return self.feed[{0: 1, 1: 0}.get(index, index)]


def swap_micro_batches_of_one_stage(pipeline: Pipeline) -> None:
    """On the second stage alone: the tokens of the first are not those of the labels."""
    for module in pipeline.modules:
        if module.stage == 1:
            module.feed = Swapped(module.feed)


def average_gradients(pipeline: Pipeline) -> None:
    """Torch's default: divided by the number of micro-batches."""
    build = pipeline._build

    def averaging(*shape: int) -> Any:
        schedule = build(*shape)
        schedule.scale_grads = True
        return schedule

    pipeline._build = averaging


def keep_tied_gradients_apart(pipeline: Pipeline) -> None:
    pipeline._sum_tied_gradients = lambda before: None


def red(case: Case, sabotage: Callable[[Pipeline], None]) -> float:
    """Largest difference of a gradient under sabotage."""
    found = on_kept_ranks(one_step, case.pp, case, sabotage)
    _, gradients = cases.reference(case.model)
    return cases.worst_difference([(rank.gradients, rank.placements) for rank in found], gradients)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("model", [cases.llama(4), cases.gpt(4)], ids=["llama", "gpt"])
def test_micro_batches_swapped_in_one_stage_turn_the_matrix_red(
    model: ModelConfig, schedule: Schedule
) -> None:
    assert red(Case(model, schedule), swap_micro_batches_of_one_stage) > 1e-3


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_zero_bubble"])
def test_gradients_averaged_over_micro_batches_turn_the_matrix_red(schedule: Schedule) -> None:
    assert red(Case(cases.llama(4), schedule), average_gradients) == pytest.approx(0.75)


def test_a_tied_embedding_whose_gradients_are_not_summed_turns_the_matrix_red() -> None:
    assert red(Case(cases.llama(4)), keep_tied_gradients_apart) > 1e-3


# What torch's schedules get wrong in silence, or late.


def rows(case: Case, *ranges: range) -> list[Batch]:
    return [cases.rows_of_global_batch(case.model, part) for part in ranges]


def refused_sizes(case: Case) -> str:
    with pipeline_of(case) as (_, pipeline, _mesh):
        pipeline.traffic.take()
        with pytest.raises(DataError) as refusal:
            pipeline.run(rows(case, range(2), range(2, 4), range(4, 7)), 1)
        assert not pipeline.traffic.take()
        return str(refusal.value)


def test_micro_batches_of_unequal_size_are_refused_before_any_message() -> None:
    for message in on_kept_ranks(refused_sizes, 2, Case(cases.llama(2))):
        assert message.startswith("micro-batch 2 has 48 tokens and micro-batch 0 has 32")


def uneven_number(case: Case) -> Found:
    with pipeline_of(case) as (decoder, pipeline, _mesh):
        batches = rows(case, range(2), range(2, 4), range(4, 6))
        loss = pipeline.run(batches, 100)
        whole = {name: Placement(tuple(p.shape)) for name, p in decoder.named_parameters()}
        return Found(loss.item() / 100, cases.gradients_of(decoder), whole)


def test_a_batch_need_not_divide_by_the_number_of_micro_batches_for_none_is_cut() -> None:
    case = Case(cases.llama(4), "interleaved_1f1b")
    decoder = cases.reference_decoder(case.model)
    loss = decoder.loss_sum(cases.rows_of_global_batch(case.model, range(6))) / 100
    loss.backward()
    found = on_kept_ranks(uneven_number, 2, case)
    assert [rank.loss for rank in found] == pytest.approx([loss.item()] * 2, rel=1e-12)
    per_rank = [(rank.gradients, rank.placements) for rank in found]
    assert cases.worst_difference(per_rank, cases.gradients_of(decoder)) < LIMIT


def changing_shapes(case: Case) -> tuple[list[Found], list[float]]:
    """Steps of 2, 4, 2 and 1 rows in a micro-batch, as far as the schedule has them, evaluations between them."""
    with pipeline_of(case) as (decoder, pipeline, mesh):
        found, evaluations = [], []
        for num_microbatches in (4, 2, 4, 8):
            if not legal_micro_batches(case.schedule, case.pp, num_microbatches):
                continue
            decoder.zero_grad(set_to_none=True)
            found.append(step(replace(case, num_microbatches=num_microbatches), decoder, pipeline, mesh))
            pipeline.traffic.take()
            decoder.eval()
            evaluations.append(pipeline.evaluate(cases.micro_batches(case.model, 4)).item())
            decoder.train()
            assert {key: count.bytes for key, count in pipeline.traffic.take().items()} == payload_bytes(
                case.plan, mesh.index("pp"), 4, 8 * 32 * case.model.hidden_size, 0, 8, backward=False
            )
            found.append(Found(found[-1].loss, cases.gradients_of(decoder), found[-1].placements))
        return found, evaluations


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_another_micro_batch_size_gets_another_schedule_and_evaluation_leaves_gradients_alone(
    schedule: Schedule,
) -> None:
    case = Case(cases.llama(4), schedule)
    per_rank = on_kept_ranks(changing_shapes, 2, case)
    for steps in zip(*(found for found, _ in per_rank), strict=True):
        assert worst(list(steps), case) < LIMIT
    loss, _ = cases.reference(case.model)
    for _, evaluations in per_rank:
        assert len(evaluations) >= 3
        assert evaluations == pytest.approx(
            [loss * cases.valid_tokens(case.model)] * len(evaluations), rel=1e-12
        )


def evaluated(case: Case, rows_at_once: int) -> tuple[float, float]:
    with pipeline_of(case) as (decoder, pipeline, _mesh):
        decoder.eval()
        parts = [range(start, start + rows_at_once) for start in range(0, cases.ROWS, rows_at_once)]
        first = pipeline.evaluate(rows(case, *parts)).item()
        return first, pipeline.evaluate(rows(case, parts[0])).item()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv", "dualpipev"])
def test_any_number_of_batches_is_evaluated(schedule: Schedule) -> None:
    case = Case(cases.llama(4), schedule)
    decoder = cases.reference_decoder(case.model)
    whole = decoder.loss_sum(cases.rows_of_global_batch(case.model, range(8))).item()
    part = decoder.loss_sum(cases.rows_of_global_batch(case.model, range(1))).item()
    for first, second in on_kept_ranks(evaluated, 2, case, 1):
        assert first == pytest.approx(whole, rel=1e-12)
        assert second == pytest.approx(part, rel=1e-12)


def accumulated(case: Case) -> Found:
    """Two runs without clearing the gradients between them."""
    with pipeline_of(case) as (decoder, pipeline, mesh):
        step(case, decoder, pipeline, mesh)
        return step(case, decoder, pipeline, mesh)


def test_a_second_run_adds_to_the_gradients_of_the_first_tied_ones_too() -> None:
    case = Case(cases.gpt(2))
    _, gradients = cases.reference(case.model)
    twice = {name: 2 * gradient for name, gradient in gradients.items()}
    found = on_kept_ranks(accumulated, 2, case)
    assert cases.worst_difference([(rank.gradients, rank.placements) for rank in found], twice) < LIMIT


def trained(case: Case) -> tuple[list[float], dict[str, np.ndarray]]:
    """Three steps of AdamW with clipping; the norm counts each parameter once."""
    with pipeline_of(case) as (decoder, pipeline, mesh):
        optimizer = build_optimizer(decoder, cases.OPTIMIZER)
        losses = []
        for number in range(3):
            losses.append(step(case, decoder, pipeline, mesh, number).loss)
            whole = {name: Placement(tuple(p.shape)) for name, p in decoder.named_parameters()}
            placements = pipeline.placements(whole)
            squares = torch.zeros((), dtype=torch.float64)
            for name, parameter in decoder.named_parameters():
                if "pp" not in placements[name].replicated or mesh.index("pp") == 0:
                    squares += parameter.grad.square().sum()
            dist.all_reduce(squares, group=mesh.group("pp"))
            factor = min(1.0, cases.MAX_NORM / (squares.sqrt().item() + 1e-6))
            for parameter in decoder.parameters():
                parameter.grad *= factor
            optimizer.step()
            optimizer.zero_grad()
        return losses, {name: value.detach().numpy().copy() for name, value in decoder.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_three_steps_of_adamw_over_two_pipelines_equal_one_process(schedule: Schedule) -> None:
    case = Case(cases.llama(4), schedule, dp=2)
    losses, parameters = cases.reference_training(case.model)
    for found_losses, found in on_kept_ranks(trained, 4, case):
        assert found_losses == pytest.approx(losses, rel=1e-9)
        assert max(cases.differences(found, parameters).values()) < LIMIT


def fully_sharded(case: Case, compiled: bool = False) -> Found:
    """FSDP2 around each stage, told to drop parameters after forward."""
    with pipeline_of(case) as (decoder, pipeline, mesh):
        if compiled:
            decoder.compile_blocks("aot_eager")
        whole = {name: Placement(tuple(p.shape)) for name, p in decoder.named_parameters()}
        shards = [
            FullySharded(module, list(module.blocks.values()), mesh, whole, Traffic(), forward_methods=())
            for module in pipeline.modules
        ]
        batches = cases.micro_batches(case.model, case.num_microbatches, mesh.index("dp"), case.dp)
        total = cases.valid_tokens(case.model)
        before = pipeline.evaluate(batches)
        for _ in range(2):
            loss = pipeline.run(batches, total)
            for shard in shards:
                shard.finish()
            held = {name: one for shard in shards for name, one in shard.gradients().items()}
            gradients = {name: one.tensor.numpy().copy() for name, one in held.items()}
            decoder.zero_grad(set_to_none=True)
        assert loss.item() == before.item()
        dist.all_reduce(loss, group=mesh.group("dp"))
        assert held.keys() == whole.keys()
        return Found(loss.item() / total, gradients, {name: one.placement for name, one in held.items()})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameters_that_fsdp_would_drop_after_forward_do_not_spoil_a_schedule(schedule: Schedule) -> None:
    case = Case(cases.llama(4, untied=schedule in V_SHAPED), schedule, dp=2)
    assert worst(on_kept_ranks(fully_sharded, 4, case), case) < LIMIT


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble"])
def test_more_stages_on_a_rank_than_torch_keeps_gathered_train_and_are_evaluated(schedule: Schedule) -> None:
    """Three are. An evaluation would drop the fourth one's parameters before it has waited for them, and fail."""
    case = Case(cases.llama(8), schedule, dp=2, virtual=4)
    assert worst(on_kept_ranks(fully_sharded, 4, case), case) < LIMIT


def caching() -> tuple[bool, ...]:
    """What the compiler may keep, and overwrite, in this process."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    return functorch.enable_autograd_cache, inductor.fx_graph_cache, functorch.donated_buffer


def compiled(case: Case) -> Found:
    before = caching()
    with pipeline_of(case) as (decoder, pipeline, mesh):
        decoder.compile_blocks("aot_eager")
        assert caching() == before, "a pipeline changes how its process compiles"
        # What any dry run does first, and what compiled code then takes for its only use.
        batch = cases.rows_of_global_batch(case.model, range(2))
        hidden_TD = torch.ones(32, case.model.hidden_size, dtype=torch.float64, requires_grad=True)
        decoder.run_blocks(hidden_TD, batch).sum().backward()
        decoder.zero_grad(set_to_none=True)
        return step(case, decoder, pipeline, mesh)


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=pytest.mark.long) for name in ("interleaved_zero_bubble", "zbv", "dualpipev")],
)
def test_compiled_blocks_run_under_a_schedule_that_goes_through_backward_twice(schedule: Schedule) -> None:
    case = Case(cases.llama(4), schedule)
    assert worst(on_ranks(compiled, 2, case), case) < LIMIT


@pytest.mark.long
@pytest.mark.parametrize("virtual", [2, 4])
def test_compiled_blocks_of_sharded_stages_run_under_a_schedule_that_goes_through_backward_twice(
    virtual: int,
) -> None:
    case = Case(cases.llama(8), "interleaved_zero_bubble", dp=2, virtual=virtual)
    assert worst(on_ranks(fully_sharded, 4, case, True), case) < LIMIT


def other_layers(case: Case, other: tuple[int, ...]) -> str:
    """The second rank has built another cut than was asked for."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(pp=case.pp), group.ranks.rank)
        cut = replace(case, layers=other) if group.ranks.rank == 1 else case
        decoder = decoder_of_rank(case.model, torch.float64, cut.plan, group.ranks.rank, CPU)
        with pytest.raises(AssertionError) as found:
            Pipeline(decoder, case.plan, case.schedule, mesh, CPU, Traffic())
        return str(found.value)


def test_layers_built_otherwise_than_requested_are_found_on_every_rank() -> None:
    first, second = on_kept_ranks(other_layers, 2, Case(cases.llama(4), layers=(2, 2)), (1, 3))
    assert "built [1, 2, 1, 1, 1, 1] times" in first
    assert "built [1, 2, 1, 1, 1, 1] times" in second
    assert "rank 1 holds layers 1, 2, 3 and should hold 2, 3" in second
