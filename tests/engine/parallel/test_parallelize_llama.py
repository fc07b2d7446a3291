"""A model of Hugging Face's transformers, as it comes: its gradients over tensor-parallel ranks are one process'."""

from collections.abc import Mapping
from importlib.util import find_spec

import parallelize_cases as cases
import pytest
import torch
from torch import nn

from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.parallelize import parallelize
from drivetrain.engine.parallel.parallelize_plan import Word
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers (extra: dev) is not installed"
)

PLAN: Mapping[str, Word] = {
    "model.embed_tokens": "row",
    "*.q_proj": "column",
    "*.k_proj": "column",
    "*.v_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
    "lm_head": "column_gathered",
}
LAYERS, WIDTH, VOCABULARY, BATCH, LENGTH = 2, 16, 51, 2, 10


def llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=24,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )
    assert isinstance(model, nn.Module)
    return model.double().train()


def backward(model: nn.Module) -> float:
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    return float(loss)


def on_one_rank(tied: bool) -> tuple[float, float, float, dict[str, int], list[str]]:
    """The worst gradient; both losses; bytes of the second step; names that data parallelism would reduce."""
    whole = llama(tied)
    expected_loss = backward(whole)
    expected = cases.gradients(whole)
    with cases.mesh_of_all_ranks() as mesh:
        model, traffic = llama(tied), Traffic()
        placements = parallelize(model, PLAN, mesh, traffic)
        loss = backward(model)
        worst = cases.worst(cases.gradients(model), expected, placements)
        model.zero_grad()
        traffic.take()
        backward(model)
        sent = {kind: count.bytes for (_, kind), count in traffic.counts.items()}
        sync = gradient_sync(model, mesh, traffic, zero_stage=0, placements=placements)
        return worst, loss, expected_loss, sent, list(sync.parameters())


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_of_transformers_has_the_gradients_of_one_process(tied: bool) -> None:
    for worst, loss, expected_loss, sent, names in on_kept_ranks(on_one_rank, 2, tied, timeout=600):
        assert worst < 1e-9
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        stream = BATCH * LENGTH * WIDTH
        assert sent == {"all_reduce": 8 * ((4 * LAYERS + 2) * stream + BATCH * LENGTH * VOCABULARY)}
        assert ("lm_head.weight" in names) == (not tied)
