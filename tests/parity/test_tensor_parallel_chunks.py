"""Tensor parallelism in chunks on real ranks: gradients of one process, the bytes of one piece, k times the calls."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import parity_cases as cases
import pytest
import torch
from test_pipeline import CPU, Case
from test_pipeline_products import counted_products
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
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline import Pipeline, decoder_of_rank
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.tensor_parallel import tensor_parallel
from drivetrain.engine.parallel.tensor_parallel_bytes import tensor_parallel_bytes
from drivetrain.engine.parallel.tensor_parallel_overlap import WHOLE, Chunks
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks, on_ranks

MICRO_BATCHES = 2
TOKENS = cases.ROWS // MICRO_BATCHES * cases.SEQUENCE
SEVERAL = ("gpt_dropout", "llama_bias")
ALL = (*SEVERAL, "llama", "llama_one_kv_head", "llama_qk_norm", "llama_uneven_vocabulary")
CHUNKS = {"3": Chunks.of_all(3), "uneven": Chunks(qkv=5, output=1, gate_up=7, down=1000)}
SHARING = {"qkv_product": "joined", "gate_up_product": "joined", "linear": "eager"}


@dataclass
class Sent:
    """What a rank computed, and what it handed over."""

    found: Found
    calls: dict[str, int]


def step(
    model: ModelConfig,
    mesh: Mesh,
    chunks: Chunks,
    sequence_parallel: bool,
    *,
    dtype: torch.dtype = torch.float64,
    requested: Mapping[str, str] | None = None,
    compiled: str | None = None,
    async_input_gradient: bool = False,
) -> Sent:
    decoder = with_random_vectors(cases.reference_decoder(model, dtype))
    traffic = Traffic()
    placements = tensor_parallel(
        decoder, mesh, sequence_parallel, traffic, chunks, async_input_gradient=async_input_gradient
    )
    if requested is not None:
        selection = Selection(dict(requested))
        decoder.use_operators(selection)
    if compiled is not None:
        decoder.compile_blocks(compiled)
    loss = trained(decoder, model, MICRO_BATCHES)
    if requested is not None:
        assert {name for name, _ in selection.served} == set(requested)
        assert not any(choice.is_fallback for choice in selection.choices.values())
    assert all(group == "tp" for group, _ in traffic.counts)
    found = Found(
        loss,
        cases.gradients_of(decoder),
        placements,
        {kind: count.bytes for (_, kind), count in traffic.counts.items()},
    )
    return Sent(found, {kind: count.calls for (_, kind), count in traffic.counts.items()})


def matrix_on_one_rank(names: Sequence[str]) -> dict[tuple[str, bool, str], Sent]:
    with mesh_of_all_ranks() as mesh:
        return {
            (name, sequence_parallel, chunks): step(
                MODELS[name], mesh, {**CHUNKS, "whole": WHOLE}[chunks], sequence_parallel
            )
            for name in names
            for sequence_parallel in (False, True)
            for chunks in (*CHUNKS, "whole")
        }


@cache
def matrix_on(tp: int, names: Sequence[str]) -> list[dict[tuple[str, bool, str], Sent]]:
    return on_kept_ranks(matrix_on_one_rank, tp, names)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp_sp"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "name", [name if name in SEVERAL else pytest.param(name, marks=pytest.mark.long) for name in ALL]
)
def test_gradients_are_those_of_one_process_and_calls_are_k_times_as_many(
    name: str, tp: int, sequence_parallel: bool, chunks: str
) -> None:
    model = MODELS[name]
    names = SEVERAL if name in SEVERAL else ALL
    ranks = [rank[name, sequence_parallel, chunks] for rank in matrix_on(tp, names)]
    whole = [rank[name, sequence_parallel, "whole"] for rank in matrix_on(tp, names)]
    expected = one_process(model, torch.float64, MICRO_BATCHES)
    assert worst([one.found for one in ranks], expected) < 1e-9
    per_micro_batch = tensor_parallel_bytes(
        model,
        tp,
        sequence_parallel=sequence_parallel,
        tokens=TOKENS,
        compute_dtype=torch.float64,
        parameter_dtype=torch.float64,
    )
    cut = CHUNKS[chunks].of_rows(TOKENS // tp if sequence_parallel else TOKENS)
    more = MICRO_BATCHES * model.num_layers * sum(count - 1 for count in cut.by_product().values())
    chunked = ("reduce_scatter", "all_gather") if sequence_parallel else ("all_reduce",)
    for one, plain in zip(ranks, whole, strict=True):
        assert one.found.loss == pytest.approx(expected.loss, rel=1e-12)
        assert one.found.bytes == {kind: MICRO_BATCHES * count for kind, count in per_micro_batch.items()}
        assert one.found.bytes == plain.found.bytes
        assert one.calls == {
            kind: count + (more if kind in chunked else 0) for kind, count in plain.calls.items()
        }


def served_on_one_rank(sequence_parallel: bool) -> dict[str, Sent]:
    with mesh_of_all_ranks() as mesh:
        return {
            name: step(MODELS[name], mesh, Chunks.of_all(3), sequence_parallel, requested=requested)
            for name, requested in (("llama", SHARING), ("gpt_dropout", {"linear": "eager"}))
        }


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp_sp"])
def test_operators_serve_the_chunks(sequence_parallel: bool) -> None:
    ranks = on_kept_ranks(served_on_one_rank, 2, sequence_parallel)
    for name in ranks[0]:
        expected = one_process(MODELS[name], torch.float64, MICRO_BATCHES)
        assert worst([rank[name].found for rank in ranks], expected) < 1e-9


def in_half_precision(sequence_parallel: bool) -> list[Sent]:
    transposed = {**SHARING, "linear": "transposed_gradient"}
    with mesh_of_all_ranks() as mesh:
        return [
            step(
                MODELS["llama"],
                mesh,
                chunks,
                sequence_parallel,
                dtype=torch.bfloat16,
                requested=transposed,
            )
            for chunks in (WHOLE, Chunks.of_all(3), Chunks.of_all(3))
        ]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp_sp"])
def test_half_precision_is_the_same_but_for_rounding_and_the_same_each_time(sequence_parallel: bool) -> None:
    ranks = on_kept_ranks(in_half_precision, 2, sequence_parallel)
    exact = one_process(MODELS["llama"], torch.float64, MICRO_BATCHES)
    plain = worst([rank[0].found for rank in ranks], exact)
    assert worst([rank[1].found for rank in ranks], exact) < 1.25 * plain
    for whole, first, again in ranks:
        assert first.found.loss == pytest.approx(whole.found.loss, rel=1e-2)
        assert first.found.loss == again.found.loss
        for name, gradient in first.found.gradients.items():
            assert np.array_equal(gradient, again.found.gradients[name]), name


def compiled(sequence_parallel: bool, backend: str) -> Sent:
    with mesh_of_all_ranks() as mesh:
        return step(MODELS["llama_bias"], mesh, Chunks.of_all(3), sequence_parallel, compiled=backend)


@pytest.mark.parametrize(
    "sequence_parallel", [pytest.param(False, marks=pytest.mark.long), True], ids=["tp", "tp_sp"]
)
def test_compiled_blocks_leave_the_chunks_out(sequence_parallel: bool) -> None:
    ranks = on_ranks(compiled, 2, sequence_parallel, "aot_eager")
    expected = one_process(MODELS["llama_bias"], torch.float64, MICRO_BATCHES)
    assert worst([rank.found for rank in ranks], expected) < 1e-9
    plain = [rank["llama_bias", sequence_parallel, "3"] for rank in matrix_on(2, SEVERAL)]
    assert [rank.calls for rank in ranks] == [rank.calls for rank in plain]


def evaluated(chunks: Chunks) -> tuple[np.ndarray, float]:
    """Of other micro-batches than those it was built for: fewer rows than chunks among them."""
    with mesh_of_all_ranks() as mesh:
        decoder = with_random_vectors(cases.reference_decoder(MODELS["llama"])).eval()
        tensor_parallel(decoder, mesh, True, Traffic(), chunks)
        batch = cases.rows_of_global_batch(MODELS["llama"], [2])
        with torch.no_grad():
            return decoder(batch).numpy(), decoder.loss_sum(batch).item()


def test_fewer_rows_than_chunks_are_evaluated_alike() -> None:
    expected = on_kept_ranks(evaluated, 2, WHOLE)
    for found, whole in zip(on_kept_ranks(evaluated, 2, Chunks.of_all(40)), expected, strict=True):
        np.testing.assert_allclose(found[0], whole[0], rtol=1e-10, atol=1e-12)
        assert found[1] == pytest.approx(whole[1], rel=1e-12)


def pipelines(schedules: Sequence[Any], sequence_parallel: bool) -> list[tuple[Counter[str], dict[Any, Any]]]:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(tp=2, pp=2), group.ranks.rank)
        return [pipeline_step(name, mesh, sequence_parallel) for name in schedules]


def pipeline_step(schedule: Any, mesh: Mesh, sequence_parallel: bool) -> tuple[Counter[str], dict[Any, Any]]:
    case = Case(cases.gpt(4), schedule)
    decoder = decoder_of_rank(case.model, torch.float64, case.plan, mesh.index("pp"), CPU)
    initialize(decoder, cases.SEED)
    traffic = Traffic()
    tensor_parallel(decoder, mesh, sequence_parallel, traffic, Chunks.of_all(3))
    shards = 2 if sequence_parallel else 1
    pipeline = Pipeline(decoder, case.plan, case.schedule, mesh, CPU, traffic, sequence_shards=shards)
    batches, tokens = cases.micro_batches(case.model, case.num_microbatches), cases.valid_tokens(case.model)
    with counted_products() as found:
        pipeline.run(batches, tokens)
    sent = {key: (count.calls, count.bytes) for key, count in traffic.counts.items() if key[0] == "tp"}
    return found, sent


@pytest.mark.parametrize(
    "sequence_parallel", [pytest.param(True, marks=pytest.mark.long), False], ids=["tp_sp", "tp"]
)
def test_a_backward_in_two_halves_computes_and_sends_nothing_twice(sequence_parallel: bool) -> None:
    schedules = ("1f1b", *sorted(ZERO_BUBBLE))
    per_rank = on_ranks(pipelines, 4, schedules, sequence_parallel)
    sums = []
    for of_schedule in zip(*per_rank, strict=True):
        products: Counter[str] = Counter()
        sent: Counter[Any] = Counter()
        for found, traffic in of_schedule:
            products += found
            for key, (calls, nbytes) in traffic.items():
                sent[*key, "calls"] += calls
                sent[*key, "bytes"] += nbytes
        sums.append((products, sent))
    assert sums[0][0]["products"] > 0
    assert all(one == sums[0] for one in sums[1:])


def with_and_without_waiting(sequence_parallel: bool) -> dict[str, list[Sent]]:
    cases_of_dtype = [
        ("llama", torch.float64, None),
        ("llama_bias", torch.float32, None),
        ("gpt_dropout", torch.bfloat16, None),
        ("llama", torch.bfloat16, {**SHARING, "linear": "transposed_gradient"}),
    ]
    with mesh_of_all_ranks() as mesh:
        return {
            f"{name} {dtype}": [
                step(
                    MODELS[name],
                    mesh,
                    WHOLE,
                    sequence_parallel,
                    dtype=dtype,
                    requested=requested,
                    async_input_gradient=beside,
                )
                for beside in (False, True)
            ]
            for name, dtype, requested in cases_of_dtype
        }


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp_sp"])
def test_gradients_that_travel_beside_those_of_weights_are_the_same_bits(sequence_parallel: bool) -> None:
    for rank in on_kept_ranks(with_and_without_waiting, 2, sequence_parallel):
        for name, (waiting, beside) in rank.items():
            assert beside.found.loss == waiting.found.loss, name
            assert (beside.calls, beside.found.bytes) == (waiting.calls, waiting.found.bytes), name
            for parameter, gradient in waiting.found.gradients.items():
                assert np.array_equal(beside.found.gradients[parameter], gradient), f"{name}: {parameter}"


def regions(sequence_parallel: bool) -> list[dict[str, int]]:
    """What a profile shows of one micro-batch: in chunks, beside the gradients of weights, and plain."""
    model = MODELS["llama"]
    ways: list[tuple[Chunks, bool]] = [(Chunks.of_all(3), False), (WHOLE, True), (WHOLE, False)]
    found = []
    with mesh_of_all_ranks() as mesh:
        for chunks, beside in ways:
            decoder = cases.reference_decoder(model)
            tensor_parallel(decoder, mesh, sequence_parallel, Traffic(), chunks, async_input_gradient=beside)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                decoder.loss_sum(cases.micro_batches(model, 1)[0]).backward()
            names = [event.name for event in profile.events() if event.name.startswith("drivetrain/tp_")]
            found.append(dict(Counter(names)))
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp_sp"])
def test_a_profile_shows_each_collective_of_a_chunk(sequence_parallel: bool) -> None:
    layers = MODELS["llama"].num_layers
    for chunked, beside, plain in on_kept_ranks(regions, 2, sequence_parallel):
        assert plain == {}
        if sequence_parallel:
            # Two of each kind in a layer, forward and backward.
            each = 3 * 4 * layers
            assert chunked == {"drivetrain/tp_chunk/gathered": each, "drivetrain/tp_chunk/scattered": each}
            assert beside == {"drivetrain/tp_async/gathered": 4 * layers}
        else:
            each = 3 * 2 * layers
            assert chunked == {"drivetrain/tp_chunk/copied": each, "drivetrain/tp_chunk/summed": each}
            assert beside == {"drivetrain/tp_async/copied": 2 * layers}
