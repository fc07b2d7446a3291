"""Tensor and sequence parallelism: gradients of one process, bytes of the closed formula, planted mistakes seen."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import parity_cases as cases
import pytest
import torch
import torch.nn.functional as F

from drivetrain.config import ModelConfig
from drivetrain.config.layout import Layout
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import parameter_generator
from drivetrain.engine.parallel import collectives
from drivetrain.engine.parallel import tensor_parallel as module
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.tensor_parallel import tensor_parallel
from drivetrain.engine.parallel.tensor_parallel_bytes import tensor_parallel_bytes
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks, on_ranks

DROPOUT_SEED = 11
MODELS = {
    "llama": cases.llama(),
    "llama_untied": cases.llama(untied=True),
    "llama_one_kv_head": cases.llama(num_query_groups=1),
    "llama_qk_norm": cases.llama(qk_norm=True),
    "llama_bias": cases.llama(add_bias_linear=True, num_query_groups=1),
    "llama_wide_heads": cases.llama(kv_channels=12, qk_norm=True, untied=True),
    "llama_uneven_vocabulary": cases.llama(vocab_size=51, untied=True),
    "gpt": cases.gpt(),
    "gpt_dropout": cases.gpt(dropout=0.2),
    "gpt_untied_positions": cases.gpt(untie_embeddings_and_output_weights=True, max_position_embeddings=20),
}


@dataclass
class Found:
    """What one rank computed."""

    loss: float
    gradients: dict[str, np.ndarray]
    placements: Mapping[str, Placement]
    bytes: dict[str, int]


def with_random_vectors(decoder: Decoder) -> Decoder:
    """Norms and biases that are not 1 and 0, so that none of them can be left out, or added twice, unnoticed."""
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=parameter_generator(cases.SEED, name))
                parameter.add_(0.3 * noise)
    return decoder


def trained(decoder: Decoder, model: ModelConfig, num_microbatches: int) -> float:
    """Forward and backward of the global batch; the loss per valid token."""
    total = cases.valid_tokens(model)
    torch.manual_seed(DROPOUT_SEED)
    loss = 0.0
    for batch in cases.micro_batches(model, num_microbatches):
        part = decoder.loss_sum(batch) / total
        part.backward()
        loss += part.item()
    return loss


def one_process(model: ModelConfig, dtype: torch.dtype, num_microbatches: int) -> Found:
    decoder = with_random_vectors(cases.reference_decoder(model, dtype))
    loss = trained(decoder, model, num_microbatches)
    return Found(loss, cases.gradients_of(decoder), {}, {})


def spread(
    model: ModelConfig, mesh: Mesh, dtype: torch.dtype, sequence_parallel: bool
) -> tuple[Decoder, Mapping[str, Placement], Traffic]:
    decoder = with_random_vectors(cases.reference_decoder(model, dtype))
    traffic = Traffic()
    return decoder, tensor_parallel(decoder, mesh, sequence_parallel, traffic), traffic


@contextmanager
def mesh_of_all_ranks() -> Iterator[Mesh]:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        yield Mesh.form(Layout(tp=group.size), group.ranks.rank)


def step(
    decoder: Decoder, placements: Mapping[str, Placement], traffic: Traffic, num_microbatches: int
) -> Found:
    loss = trained(decoder, decoder.model, num_microbatches)
    assert all(group == "tp" for group, _ in traffic.counts)
    sent = {kind: count.bytes for (_, kind), count in traffic.counts.items()}
    return Found(loss, cases.gradients_of(decoder), placements, sent)


def on_one_rank(
    model: ModelConfig,
    dtype: torch.dtype,
    sequence_parallel: bool,
    num_microbatches: int,
    mutation: str | None,
) -> Found:
    with mesh_of_all_ranks() as mesh:
        parts = spread(model, mesh, dtype, sequence_parallel)
        with MUTATIONS[mutation]() if mutation else nullcontext():
            return step(*parts, num_microbatches)


def matrix_on_one_rank() -> dict[tuple[str, bool], Found]:
    with mesh_of_all_ranks() as mesh:
        return {
            (name, sequence_parallel): step(*spread(model, mesh, torch.float64, sequence_parallel), 2)
            for name, model in MODELS.items()
            for sequence_parallel in (False, True)
        }


@cache
def matrix_on(tp: int) -> list[dict[tuple[str, bool], Found]]:
    """Every model on ``tp`` ranks, with and without sequence parallelism: processes are started once."""
    return on_kept_ranks(matrix_on_one_rank, tp)


def found_on(
    model: ModelConfig,
    tp: int,
    *,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float64,
    num_microbatches: int = 2,
    mutation: str | None = None,
) -> list[Found]:
    return on_kept_ranks(on_one_rank, tp, model, dtype, sequence_parallel, num_microbatches, mutation)


def worst(found: list[Found], expected: Found) -> float:
    return cases.worst_difference([(rank.gradients, rank.placements) for rank in found], expected.gradients)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp_sp"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_process_and_bytes_those_of_the_formula(
    name: str, tp: int, sequence_parallel: bool
) -> None:
    model = MODELS[name]
    expected = one_process(model, torch.float64, 2)
    found = [rank[name, sequence_parallel] for rank in matrix_on(tp)]
    assert worst(found, expected) < 1e-9
    per_micro_batch = tensor_parallel_bytes(
        model,
        tp,
        sequence_parallel=sequence_parallel,
        tokens=cases.ROWS // 2 * model.seq_length,
        compute_dtype=torch.float64,
        parameter_dtype=torch.float64,
    )
    for rank in found:
        assert rank.loss == pytest.approx(expected.loss, rel=1e-12)
        assert rank.loss == found[0].loss, "ranks differ in their loss"
        assert rank.bytes == {kind: 2 * count for kind, count in per_micro_batch.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp_sp"])
@pytest.mark.parametrize("name", ["llama_one_kv_head", "gpt_dropout"])
def test_gradients_in_single_precision(name: str, sequence_parallel: bool) -> None:
    expected = one_process(MODELS[name], torch.float32, 1)
    found = found_on(
        MODELS[name], 2, sequence_parallel=sequence_parallel, dtype=torch.float32, num_microbatches=1
    )
    assert worst(found, expected) < 1e-5


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp_sp"])
@pytest.mark.parametrize("name", ["llama_bias", "gpt", "llama_qk_norm"])
def test_half_precision_sends_activations_in_half_the_bytes(name: str, sequence_parallel: bool) -> None:
    model = MODELS[name]
    expected = one_process(model, torch.bfloat16, 1)
    found = found_on(model, 2, sequence_parallel=sequence_parallel, dtype=torch.bfloat16, num_microbatches=1)
    sent = tensor_parallel_bytes(
        model,
        2,
        sequence_parallel=sequence_parallel,
        tokens=cases.ROWS * model.seq_length,
        compute_dtype=torch.bfloat16,
    )
    for rank in found:
        assert rank.loss == pytest.approx(expected.loss, rel=1e-2)
        assert rank.bytes == sent
        assert rank.loss == found[0].loss
        assert all(gradient.dtype == np.float32 for gradient in rank.gradients.values())
        if name == "gpt":
            # A bias that softmax does not see: its gradient is round-off.
            rank.gradients = {key: g for key, g in rank.gradients.items() if not key.endswith("key.bias")}
    if name == "gpt":
        expected.gradients = {key: expected.gradients[key] for key in found[0].gradients}
    # bf16 keeps 8 bits: a summand that is rounded before the sum is worth some of them.
    assert worst(found, expected) < 0.1


def test_every_rank_holds_its_part_and_replicas_are_numbered() -> None:
    found = [rank["llama_uneven_vocabulary", False] for rank in matrix_on(4)]
    assert [rank.gradients["output.weight"].shape[0] for rank in found] == [13, 13, 13, 12]
    keys = [rank.placements["blocks.0.attention.key.weight"] for rank in found]
    assert [key.slices()[0] for key in keys] == [slice(0, 4), slice(0, 4), slice(4, 8), slice(4, 8)]
    assert [key.shards[0].replica for key in keys] == [0, 1, 0, 1]
    assert keys[0].full_shape == (8, 16)
    norm = found[0].placements["blocks.1.mlp_norm.weight"]
    assert (norm.shards, norm.replicated) == ((), frozenset({"tp"}))
    whole = sum(
        value.size
        for value in one_process(MODELS["llama_uneven_vocabulary"], torch.float32, 1).gradients.values()
    )
    counted = sum(
        value.size
        for index, rank in enumerate(found)
        for name, value in rank.gradients.items()
        if not any(shard.replica for shard in rank.placements[name].shards)
        and (rank.placements[name].shards or index == 0)
    )
    assert counted == whole


@contextmanager
def gradient_scaled_by_tp() -> Iterator[None]:
    """The sum after a row-parallel matrix is differentiated as a sum once more."""

    def summed_twice(x: torch.Tensor, group: collectives.Group) -> torch.Tensor:
        return collectives._pair(x, group.all_reduce, group.all_reduce)

    with patch.object(module, "summed", summed_twice):
        yield


@contextmanager
def bias_added_on_every_rank() -> Iterator[None]:
    """A row-parallel bias is part of every summand, and so comes out as often as there are ranks."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        reduce = module.scattered if self.sequence_parallel else module.summed
        return reduce(F.linear(x, self.weight, self.bias), self.group)

    with patch.object(module.RowParallelLinear, "forward", forward):
        yield


@contextmanager
def no_sum_of_copies() -> Iterator[None]:
    """Gradients of norms, biases and shared keys stay those of a rank's own tokens and heads."""
    with patch.object(module, "copied", lambda x, group: x):
        yield


@contextmanager
def masks_of_another_rank() -> Iterator[None]:
    """Every rank takes the first part of a mask."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.probability, self.training)

    with patch.object(module.DropoutOfOwnTokens, "forward", forward):
        yield


MUTATIONS = {
    "gradient_scaled_by_tp": gradient_scaled_by_tp,
    "bias_added_on_every_rank": bias_added_on_every_rank,
    "no_sum_of_copies": no_sum_of_copies,
    "masks_of_another_rank": masks_of_another_rank,
}


@pytest.mark.parametrize(
    ("mutation", "name", "sequence_parallel"),
    [
        ("gradient_scaled_by_tp", "llama", False),
        ("bias_added_on_every_rank", "gpt", False),
        ("bias_added_on_every_rank", "gpt", True),
        ("no_sum_of_copies", "llama", True),
        ("no_sum_of_copies", "llama_bias", False),
        ("masks_of_another_rank", "gpt_dropout", True),
    ],
)
def test_a_planted_mistake_is_seen(mutation: str, name: str, sequence_parallel: bool) -> None:
    model = MODELS[name]
    expected = one_process(model, torch.float64, 1)
    found = found_on(model, 2, sequence_parallel=sequence_parallel, num_microbatches=1, mutation=mutation)
    assert worst(found, expected) > 1e-3


def logits_and_evaluation(model: ModelConfig, sequence_parallel: bool) -> tuple[np.ndarray, float]:
    with mesh_of_all_ranks() as mesh:
        decoder = spread(model, mesh, torch.float64, sequence_parallel)[0].eval()
        batch = cases.micro_batches(model, 2)[1]
        with torch.no_grad():
            return decoder(batch).numpy(), decoder.loss_sum(batch).item()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp_sp"])
def test_logits_and_evaluation_are_those_of_one_process(sequence_parallel: bool) -> None:
    model = cases.gpt(dropout=0.2, vocab_size=50)
    decoder = with_random_vectors(cases.reference_decoder(model)).eval()
    batch = cases.micro_batches(model, 2)[1]
    with torch.no_grad():
        logits, loss = decoder(batch).numpy(), decoder.loss_sum(batch).item()
    for found, found_loss in on_kept_ranks(logits_and_evaluation, 4, model, sequence_parallel):
        np.testing.assert_allclose(found, logits, rtol=1e-10, atol=1e-12)
        assert found_loss == pytest.approx(loss, rel=1e-12)


def compiled(model: ModelConfig, sequence_parallel: bool, backend: str) -> Found:
    with mesh_of_all_ranks() as mesh:
        parts = spread(model, mesh, torch.float64, sequence_parallel)
        parts[0].compile_blocks(backend)
        return step(*parts, 2)


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "backend"),
    [
        pytest.param("llama", True, "inductor", marks=pytest.mark.long),
        ("gpt", False, "aot_eager"),
    ],
)
def test_compiled_blocks_have_the_same_gradients_and_traffic(
    name: str, sequence_parallel: bool, backend: str
) -> None:
    model = MODELS[name]
    found = on_ranks(compiled, 2, model, sequence_parallel, backend, timeout=600)
    assert worst(found, one_process(model, torch.float64, 2)) < 1e-9
    assert [rank.bytes for rank in found] == [rank[name, sequence_parallel].bytes for rank in matrix_on(2)]
