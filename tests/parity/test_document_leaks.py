"""Packed documents do not see each other: by whatever computes attention, and where ranks share the model.

Document A is changed; losses of document B, and gradients of its loss at its input embeddings, stay equal to the bit.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import parity_cases as cases
import pytest
import torch
from test_tensor_parallel import with_random_vectors

from drivetrain.config import ModelConfig
from drivetrain.config.layout import Layout
from drivetrain.config.stages import plan_stages
from drivetrain.engine.model.batch import Batch, documents_of
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline import Pipeline, decoder_of_rank
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.tensor_parallel import tensor_parallel
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.probe import losses_of_places
from rank_processes import on_kept_ranks

MODELS = {"llama": cases.llama(), "gpt": cases.gpt()}
BACKENDS = (None, "eager", "dense", "chunked")
"""None: what the model computes without operators. The others need other hardware, or an interpreter."""
PAIRS = ((0, 1), (1, 0), (2, 1), (1, 2))
Seen = dict[str, np.ndarray]


def batch_of(model: ModelConfig, perturbed: int | None, kept: int) -> Batch:
    """Two rows of several documents; loss on document ``kept`` alone; document ``perturbed`` has other tokens."""
    batch = cases.rows_of_global_batch(model, [1, 2])
    documents = documents_of(batch)
    assert len(documents) > 4
    ids = batch.token_ids.flatten().clone()
    if perturbed is not None:
        first, last = documents[perturbed]
        ids[first:last] = (ids[first:last] + 1 + torch.arange(last - first)) % model.vocab_size
    mask = torch.zeros(ids.numel(), dtype=torch.bool)
    mask[slice(*documents[kept])] = True
    shape = batch.token_ids.shape
    return replace(
        batch, token_ids=ids.view(shape), loss_mask=mask.view(shape), num_valid_tokens=int(mask.sum())
    )


@contextmanager
def embeddings_of(decoder: Decoder) -> Any:
    """The outputs of the embedding while this is entered, which keep their gradients."""
    found: list[torch.Tensor] = []

    def keep(_module: object, _inputs: object, output: torch.Tensor) -> None:
        output.retain_grad()
        found.append(output)

    embedding = getattr(decoder, "embedding", None)
    handle = None if embedding is None else embedding.register_forward_hook(keep)
    yield found
    if handle is not None:
        handle.remove()


def seen(
    decoder: Decoder,
    batch: Batch,
    evaluate: Callable[[Batch], object],
    train: Callable[[Batch], object],
) -> Seen:
    """Losses of all places, and gradients at the input embeddings, of what this rank holds."""
    result: Seen = {}
    losses = losses_of_places(decoder, evaluate, batch)
    if losses is not None:
        result["losses"] = losses.flatten().numpy()
    with embeddings_of(decoder) as embeddings:
        train(batch)
    if embeddings:
        gradient = embeddings[-1].grad
        assert gradient is not None
        result["gradients"] = gradient.detach().flatten(0, -2).numpy().copy()
    return result


def require_isolated(before: Seen, after: Seen, model: ModelConfig, perturbed: int, kept: int) -> None:
    documents = documents_of(batch_of(model, None, kept))
    place, changed = slice(*documents[kept]), slice(*documents[perturbed])
    if "losses" in before:
        assert np.array_equal(before["losses"][place], after["losses"][place]), "losses"
        assert not np.array_equal(before["losses"][changed], after["losses"][changed]), "of A itself"
    if "gradients" in before:
        assert np.array_equal(before["gradients"][place], after["gradients"][place]), "gradients"
        assert np.abs(before["gradients"][place]).sum() > 0
        outside = before["gradients"].copy()
        outside[place] = 0
        assert not outside.any(), "the loss of a document reaches another one"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_no_attention_lets_a_document_see_another(name: str, backend: str | None, dtype: torch.dtype) -> None:
    model = MODELS[name]
    decoder = with_random_vectors(cases.reference_decoder(model, dtype))
    if backend is not None:
        selection = Selection({"attention": backend})
        decoder.use_operators(selection)

    def train(batch: Batch) -> None:
        decoder.loss_sum(batch).backward()

    for perturbed, kept in PAIRS:
        before, after = (
            seen(decoder, batch_of(model, which, kept), decoder.loss_sum, train)
            for which in (None, perturbed)
        )
        require_isolated(before, after, model, perturbed, kept)
    if backend is not None:
        assert {served for operator, served in selection.served if operator == "attention"} == {backend}


def on_tensor_parallel_ranks(sequence_parallel: bool) -> list[tuple[Seen, Seen]]:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(tp=group.size), group.ranks.rank)
        model = MODELS["llama"]
        decoder = with_random_vectors(cases.reference_decoder(model, torch.float32))
        tensor_parallel(decoder, mesh, sequence_parallel, Traffic())

        def train(batch: Batch) -> None:
            decoder.loss_sum(batch).backward()

        return [
            tuple(
                seen(decoder, batch_of(model, which, kept), decoder.loss_sum, train)
                for which in (None, perturbed)
            )
            for perturbed, kept in PAIRS
        ]


def test_tensor_parallel_ranks_let_no_document_see_another() -> None:
    for rank in on_kept_ranks(on_tensor_parallel_ranks, 2, False):
        for (before, after), pair in zip(rank, PAIRS, strict=True):
            assert before.keys() == {"losses", "gradients"}
            require_isolated(before, after, MODELS["llama"], *pair)


def test_sequence_parallel_ranks_let_no_document_see_another() -> None:
    model = MODELS["llama"]
    per_rank = on_kept_ranks(on_tensor_parallel_ranks, 2, True)
    for number, pair in enumerate(PAIRS):
        # Each rank has the losses of all places, and the gradients of its half of the tokens.
        for rank in per_rank:
            before, after = rank[number]
            require_isolated({"losses": before["losses"]}, {"losses": after["losses"]}, model, *pair)
        halves = [[rank[number][which]["gradients"] for rank in per_rank] for which in (0, 1)]
        joined = [joined_tokens(parts, model) for parts in halves]
        require_isolated({"gradients": joined[0]}, {"gradients": joined[1]}, model, *pair)


def joined_tokens(parts: list[np.ndarray], model: ModelConfig) -> np.ndarray:
    """Gradients of all tokens from those of the ranks' pieces; unchanged where each rank has all."""
    whole = 2 * model.seq_length
    return parts[0] if len(parts[0]) == whole else np.concatenate(parts)


def on_pipeline_ranks() -> list[tuple[Seen, Seen]]:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(pp=group.size), group.ranks.rank)
        model, cpu = MODELS["llama"], torch.device("cpu")
        plan = plan_stages(model.num_layers, 2, "1f1b", None, None)
        decoder = decoder_of_rank(model, torch.float32, plan, mesh.index("pp"), cpu)
        initialize(decoder, cases.SEED)
        pipeline = Pipeline(decoder, plan, "1f1b", mesh, cpu, Traffic())
        # A schedule of two ranks takes two micro-batches at least: the same one twice.
        return [
            tuple(
                seen(
                    decoder,
                    batch_of(model, which, kept),
                    lambda batch: pipeline.evaluate([batch, batch]),
                    lambda batch: pipeline.run([batch, batch], 1),
                )
                for which in (None, perturbed)
            )
            for perturbed, kept in PAIRS
        ]


def test_pipeline_stages_let_no_document_see_another() -> None:
    first, last = on_kept_ranks(on_pipeline_ranks, 2)
    for (start, end), pair in zip(zip(first, last, strict=True), PAIRS, strict=True):
        assert "gradients" in start[0]
        assert "losses" in end[0]
        for before, after in (start, end):
            require_isolated(before, after, MODELS["llama"], *pair)
