"""The decoder as a whole: dtypes, tied weights, dropout, the meta device."""

import pytest
import torch
from model_examples import FAMILIES, decoder_of, gradients_of, model_of, packed_batch

from differences import relative_difference
from drivetrain.engine.model.decoder import Decoder
from drivetrain.measure.parameters import parameter_count

ROWS = [[5, 12, 7], [24]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_logits_have_the_compute_dtype_and_masters_get_fp32_gradients(family, dtype):
    decoder = decoder_of(model_of(family), dtype)
    batch = packed_batch(ROWS)
    logits = decoder(batch)
    assert logits.shape == (2, 24, 61)
    assert logits.dtype == dtype
    master = torch.float64 if dtype == torch.float64 else torch.float32
    assert decoder.loss_sum(batch).dtype == master
    gradients = gradients_of(decoder, batch)
    assert {gradient.dtype for gradient in gradients.values()} == {master}
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_is_the_cross_entropy_of_the_logits_over_valid_tokens(family):
    decoder = decoder_of(model_of(family), torch.float64)
    batch = packed_batch(ROWS)
    losses = torch.nn.functional.cross_entropy(
        decoder(batch).flatten(0, 1), batch.labels.flatten(), reduction="none"
    )
    wanted = losses[batch.loss_mask.flatten()].sum()
    assert abs(decoder.loss_sum(batch).item() - wanted.item()) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_the_configuration_counts(family):
    model = model_of(family)
    with torch.device("meta"):
        decoder = Decoder(model, torch.bfloat16)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == parameter_count(model).total


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_tied_embedding_gets_the_gradients_of_both_ends(family):
    tied = decoder_of(model_of(family), torch.float64)
    untied = decoder_of(model_of(family, untie_embeddings_and_output_weights=True), torch.float64)
    missing, unexpected = untied.load_state_dict(tied.state_dict(), strict=False)
    assert (missing, unexpected) == (["output.weight"], [])
    with torch.no_grad():
        untied.output.weight.copy_(tied.embedding.weight)
    batch = packed_batch(ROWS)
    apart = gradients_of(untied, batch)
    wanted = apart["embedding.weight"] + apart["output.weight"]
    torch.testing.assert_close(gradients_of(tied, batch)["embedding.weight"], wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward_run_on_the_meta_device(family):
    with torch.device("meta"):
        decoder = Decoder(model_of(family), torch.bfloat16)
    batch = packed_batch(ROWS).to("meta")
    assert decoder(batch).shape == (2, 24, 61)
    decoder.loss_sum(batch).backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())


@pytest.mark.parametrize("dropout", ["hidden_dropout", "attention_dropout"])
@pytest.mark.parametrize("family", ["llama_gqa_untied", "gpt2"])
def test_dropout_acts_in_training_only(family, dropout):
    model = model_of(family, **{dropout: 0.3})
    decoder, batch = decoder_of(model), packed_batch(ROWS)
    plain = decoder_of(model_of(family))
    assert torch.equal(decoder(batch), plain(batch))
    decoder.train()
    torch.manual_seed(1)
    first, second = decoder(batch), decoder(batch)
    torch.manual_seed(1)
    again = decoder(batch)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    plain.train()
    assert not torch.equal(first, plain(batch))


def test_input_embeddings_stand_in_for_the_token_embeddings():
    decoder, batch = decoder_of(model_of("gpt2")), packed_batch(ROWS)
    embeddings = decoder.embedding(batch.token_ids)
    assert torch.equal(decoder(batch, input_embeddings=embeddings), decoder(batch))
    assert not torch.equal(decoder(batch, input_embeddings=2 * embeddings), decoder(batch))


def test_bf16_logits_are_near_those_of_fp32():
    model = model_of("llama_gqa_untied", init_method_std=0.05)
    batch = packed_batch(ROWS)
    exact, rounded = decoder_of(model)(batch), decoder_of(model, torch.bfloat16)(batch)
    assert relative_difference(rounded, exact) < 0.02
