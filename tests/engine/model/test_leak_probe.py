"""The leak probe finds a loss that sees other documents or later tokens, and touches nothing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_examples import decoder_of, model_of, packed_batch

from drivetrain.engine.model import attention, decoder
from drivetrain.engine.probe import ProbeBatch, probe_leak

pytestmark = [
    # Raised by the compiler itself while it imports and traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def example() -> ProbeBatch:
    """Three rows of 24 places: several documents in two of them."""
    layout = [[5, 12, 7], [24], [1, 1, 22]]
    documents = np.array([np.repeat(np.arange(len(row)), row) for row in layout])
    return ProbeBatch(packed_batch(layout), documents, constructed=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama_gqa_untied", "qwen3", "gpt2"])
def test_our_decoder_is_clean(family: str, dtype: torch.dtype) -> None:
    found = probe_leak(decoder_of(model_of(family), dtype).train(), example(), documents_isolated=True)
    assert (found.verdict, found.document_leak, found.future_leak) == ("clean", 0, 0)
    assert found.control > found.tolerance


def test_a_compiled_decoder_with_dropout_is_clean() -> None:
    made = decoder_of(model_of("llama", hidden_dropout=0.2), torch.float32).train()
    made.compile_blocks()
    found = probe_leak(made, example(), documents_isolated=True)
    assert found.verdict == "clean", found.why


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_that_ignores_documents_is_found(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decoder.DocumentLayout
    monkeypatch.setattr(
        decoder, "DocumentLayout", lambda _: whole(torch.tensor([0, 24, 48, 72], dtype=torch.int32))
    )
    made = decoder_of(model_of("llama"), torch.float32)
    if compiled:
        made.compile_blocks()
    found = probe_leak(made, example(), documents_isolated=True)
    assert found.verdict == "leak"
    assert found.document_leak is not None
    assert found.document_leak > 1e-4
    assert found.future_leak == 0
    assert "another document" in found.why


def test_borders_that_the_batch_has_lost_are_found() -> None:
    # The probe takes its borders from the corpus's index: a batch without any looks like one document.
    made = example()
    layout = [[24], [24], [24]]
    lost = ProbeBatch(packed_batch(layout), made.documents, constructed=False)
    assert probe_leak(decoder_of(model_of("llama")), lost, documents_isolated=True).verdict == "leak"


@pytest.mark.parametrize("border", [5, 17, 24, 48, 49, 50])
def test_a_border_that_alone_is_lost_between_documents_or_rows_is_found(border: int) -> None:
    made = example()
    borders = made.batch.cu_seqlens
    lost = replace(made.batch, cu_seqlens=borders[borders != border])
    assert len(lost.cu_seqlens) == len(borders) - 1
    found = probe_leak(decoder_of(model_of("llama")), replace(made, batch=lost), documents_isolated=True)
    assert found.verdict == "leak"
    assert found.document_leak is not None
    assert found.document_leak > 1e-3
    assert "another document" in found.why


def test_attention_that_sees_the_future_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def both_ways(q: Any, k: Any, v: Any, documents: int, *dropout: Any) -> Any:
        q, k, v = (x.reshape(documents, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)

    monkeypatch.setattr(attention, "attend_run", both_ways)
    found = probe_leak(decoder_of(model_of("llama")), example(), documents_isolated=True)
    assert (found.verdict, found.document_leak) == ("leak", 0)
    assert "later tokens" in found.why


def test_documents_that_may_see_each_other_are_not_judged() -> None:
    found = probe_leak(decoder_of(model_of("llama")), example(), documents_isolated=False)
    assert (found.verdict, found.document_leak) == ("clean", None)
    assert "reset_attention_mask" in found.why


def test_a_probe_that_sees_nothing_says_so() -> None:
    made = decoder_of(model_of("llama"))
    with torch.no_grad():
        for block in made.blocks.values():
            block.attention.output.weight.zero_()
    found = probe_leak(made, example(), documents_isolated=True)
    assert found.verdict == "not applicable"
    assert "sees nothing" in found.why


def test_the_probe_touches_no_state() -> None:
    made = decoder_of(model_of("llama", hidden_dropout=0.2)).train()
    weights = {name: value.clone() for name, value in made.state_dict().items()}
    state = torch.get_rng_state()
    probe_leak(made, example(), documents_isolated=True)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, weights[name]) for name, value in made.state_dict().items())
    assert all(parameter.grad is None for parameter in made.parameters())
    assert made.training
