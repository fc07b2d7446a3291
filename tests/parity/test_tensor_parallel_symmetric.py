"""Products that gather and scatter by themselves: gradients of one process, and as many fused calls as blocks need.

Torch's fused operators are for CUDA tensors. Here its own fallbacks, which are what the operators mean, serve the same
operators for tensors on a CPU: arguments, shapes and counts are those of a GPU, and the overlap is not there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import parity_cases as cases
import pytest
import torch
from test_pipeline import CPU, Case
from test_tensor_parallel import (
    MODELS,
    Found,
    mesh_of_all_ranks,
    one_process,
    trained,
    with_random_vectors,
    worst,
)

from drivetrain.config import ModelConfig
from drivetrain.config.layout import Layout
from drivetrain.config.stages import ZERO_BUBBLE
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.parallel.fused_calls import FusedCalls
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline import Pipeline, decoder_of_rank
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.symmetric_memory import why_not_in_this_build
from drivetrain.engine.parallel.tensor_parallel import tensor_parallel
from drivetrain.engine.parallel.tensor_parallel_bytes import tensor_parallel_bytes
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks, on_ranks
from symmetric_fallbacks import fallbacks_on_a_cpu

MICRO_BATCHES = 2
TOKENS = cases.ROWS // MICRO_BATCHES * cases.SEQUENCE
ALL = ("gpt_dropout", "llama_bias", "llama", "llama_one_kv_head", "llama_qk_norm", "llama_uneven_vocabulary")


@dataclass
class Made:
    """What a rank computed, and the calls it made."""

    found: Found
    collectives: dict[str, int]
    fused: tuple[int, int] | None
    wrong: str | None


def step(
    model: ModelConfig,
    mesh: Mesh,
    *,
    fused: bool = True,
    dtype: torch.dtype = torch.float64,
    compiled: str | None = None,
) -> Made:
    decoder = with_random_vectors(cases.reference_decoder(model, dtype))
    traffic, calls = Traffic(), FusedCalls()
    placements = tensor_parallel(decoder, mesh, True, traffic, fused_calls=calls if fused else None)
    if compiled is not None:
        decoder.compile_blocks(compiled)
    calls.begin_step()
    loss = trained(decoder, model, MICRO_BATCHES)
    if fused:
        calls.end_step(MICRO_BATCHES)
    sent = {kind: count.bytes for (_, kind), count in traffic.counts.items()}
    return Made(
        Found(loss, cases.gradients_of(decoder), placements, sent),
        {kind: count.calls for (_, kind), count in traffic.counts.items()},
        (calls.gathers, calls.scatters) if fused else None,
        calls.wrong,
    )


def matrix_on_one_rank() -> dict[str, tuple[Made, Made]]:
    with mesh_of_all_ranks() as mesh, fallbacks_on_a_cpu():
        return {name: (step(MODELS[name], mesh), step(MODELS[name], mesh, fused=False)) for name in ALL}


@cache
def matrix_on(tp: int) -> list[dict[str, tuple[Made, Made]]]:
    return on_kept_ranks(matrix_on_one_rank, tp)


def test_this_torch_has_the_operators() -> None:
    assert why_not_in_this_build() is None


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ALL)
def test_gradients_are_those_of_one_process_and_each_block_makes_four_calls_of_a_kind(
    name: str, tp: int
) -> None:
    model = MODELS[name]
    expected = one_process(model, torch.float64, MICRO_BATCHES)
    ranks = [rank[name] for rank in matrix_on(tp)]
    assert worst([fused.found for fused, _ in ranks], expected) < 1e-9
    per_micro_batch = tensor_parallel_bytes(
        model,
        tp,
        sequence_parallel=True,
        tokens=TOKENS,
        compute_dtype=torch.float64,
        parameter_dtype=torch.float64,
    )
    must = 4 * model.num_layers * MICRO_BATCHES
    for fused, plain in ranks:
        assert fused.found.loss == pytest.approx(expected.loss, rel=1e-12)
        assert fused.fused == (must, must)
        assert fused.wrong is None
        assert fused.found.bytes == {kind: MICRO_BATCHES * count for kind, count in per_micro_batch.items()}
        assert (fused.found.bytes, fused.collectives) == (plain.found.bytes, plain.collectives)


def in_half_precision() -> list[Made]:
    with mesh_of_all_ranks() as mesh, fallbacks_on_a_cpu():
        return [
            step(MODELS["llama"], mesh, fused=fused, dtype=torch.bfloat16) for fused in (False, True, True)
        ]


def test_half_precision_is_the_same_but_for_rounding_and_the_same_each_time() -> None:
    ranks = on_kept_ranks(in_half_precision, 2)
    exact = one_process(MODELS["llama"], torch.float64, MICRO_BATCHES)
    plain = worst([rank[0].found for rank in ranks], exact)
    assert worst([rank[1].found for rank in ranks], exact) < 1.25 * plain
    for _, first, again in ranks:
        assert first.found.loss == again.found.loss
        for name, gradient in first.found.gradients.items():
            assert np.array_equal(gradient, again.found.gradients[name]), name


def evaluated() -> tuple[list[np.ndarray], tuple[int, int]]:
    found, calls = [], FusedCalls()
    with mesh_of_all_ranks() as mesh, fallbacks_on_a_cpu():
        for counts in (None, calls):
            decoder = with_random_vectors(cases.reference_decoder(MODELS["llama"])).eval()
            tensor_parallel(decoder, mesh, True, Traffic(), fused_calls=counts)
            with torch.no_grad():
                found.append(decoder(cases.rows_of_global_batch(MODELS["llama"], [2])).numpy())
    return found, (calls.gathers, calls.scatters)


def test_evaluation_makes_the_calls_of_forward_alone() -> None:
    layers = MODELS["llama"].num_layers
    for (plain, fused), calls in on_kept_ranks(evaluated, 2):
        np.testing.assert_allclose(fused, plain, rtol=1e-10, atol=1e-12)
        assert calls == (2 * layers, 2 * layers)


def with_a_layer_left_out() -> str | None:
    """One layer goes the plain way, which computes the same."""
    with mesh_of_all_ranks() as mesh, fallbacks_on_a_cpu():
        decoder, calls = cases.reference_decoder(MODELS["llama"]), FusedCalls()
        tensor_parallel(decoder, mesh, True, Traffic(), fused_calls=calls)
        decoder.blocks["0"].mlp.down.memory = None
        calls.begin_step()
        trained(decoder, MODELS["llama"], MICRO_BATCHES)
        calls.end_step(MICRO_BATCHES)
        return calls.wrong


def test_a_layer_that_makes_no_fused_call_is_said() -> None:
    layers = MODELS["llama"].num_layers
    must = 4 * layers * MICRO_BATCHES
    fewer = must - MICRO_BATCHES
    for wrong in on_kept_ranks(with_a_layer_left_out, 2):
        assert wrong == (
            f"a step made {fewer} fused gathers and {fewer} fused scatters, where {layers} blocks and "
            f"{MICRO_BATCHES} micro-batches make {must} of each"
        )


def compiled_on_one_rank() -> Made:
    with mesh_of_all_ranks() as mesh, fallbacks_on_a_cpu():
        return step(MODELS["llama_bias"], mesh, compiled="aot_eager")


@pytest.mark.long
def test_compiled_blocks_leave_the_fused_calls_out_of_their_graphs() -> None:
    ranks = on_ranks(compiled_on_one_rank, 2)
    expected = one_process(MODELS["llama_bias"], torch.float64, MICRO_BATCHES)
    assert worst([rank.found for rank in ranks], expected) < 1e-9
    assert all(rank.wrong is None for rank in ranks)


def pipelines(schedules: Sequence[Any]) -> list[tuple[int, int, str | None]]:
    with join(Ranks.from_environment(), "cpu", 1.0) as group, fallbacks_on_a_cpu():
        mesh = Mesh.form(Layout(tp=2, pp=2), group.ranks.rank)
        return [pipeline_step(name, mesh) for name in schedules]


def pipeline_step(schedule: Any, mesh: Mesh) -> tuple[int, int, str | None]:
    case = Case(cases.gpt(4), schedule)
    decoder = decoder_of_rank(case.model, torch.float64, case.plan, mesh.index("pp"), CPU)
    initialize(decoder, cases.SEED)
    traffic, calls = Traffic(), FusedCalls()
    tensor_parallel(decoder, mesh, True, traffic, fused_calls=calls)
    pipeline = Pipeline(decoder, case.plan, case.schedule, mesh, CPU, traffic, sequence_shards=2)
    calls.begin_step()
    pipeline.run(cases.micro_batches(case.model, case.num_microbatches), cases.valid_tokens(case.model))
    calls.end_step(case.num_microbatches)
    return calls.gathers, calls.scatters, calls.wrong


@pytest.mark.long
def test_a_backward_in_two_halves_calls_nothing_twice() -> None:
    for rank in on_ranks(pipelines, 4, ("1f1b", *sorted(ZERO_BUBBLE))):
        for gathers, scatters, wrong in rank:
            assert gathers == scatters > 0
            assert wrong is None


def regions() -> dict[str, int]:
    with mesh_of_all_ranks() as mesh, fallbacks_on_a_cpu():
        decoder = cases.reference_decoder(MODELS["llama"])
        tensor_parallel(decoder, mesh, True, Traffic(), fused_calls=FusedCalls())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            decoder.loss_sum(cases.micro_batches(MODELS["llama"], 1)[0]).backward()
        names = [event.name for event in profile.events() if event.name.startswith("drivetrain/tp_symmetric")]
        return {name: names.count(name) for name in names}


def test_a_profile_shows_each_fused_call() -> None:
    each = 4 * MODELS["llama"].num_layers
    for found in on_kept_ranks(regions, 2):
        assert found == {
            "drivetrain/tp_symmetric/all_gather": each,
            "drivetrain/tp_symmetric/reduce_scatter": each,
        }
