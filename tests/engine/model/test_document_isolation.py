"""Attention stays inside documents, and packing changes nothing."""

from dataclasses import replace

import pytest
import torch
from model_examples import FAMILIES, decoder_of, gradients_of, model_of, packed_batch

from differences import relative_difference
from drivetrain.engine.model.batch import Batch, documents_of

LAYOUTS = {
    "packed": [[5, 12, 7], [24], [1, 1, 22]],
    "whole_rows": [[24], [24], [24]],
    "equal_neighbours": [[8, 8, 8], [12, 12], [24]],
}


def logits_and_embedding_gradient(decoder, batch: Batch, kept: slice):
    """Logits of the tokens in ``kept``, and the gradient of their loss at all input embeddings' places."""
    embeddings = decoder.embedding(batch.token_ids).detach().to(decoder.compute_dtype).requires_grad_()
    mask = torch.zeros(batch.token_ids.numel(), dtype=torch.bool)
    mask[kept] = True
    masked = replace(batch, loss_mask=mask.view(batch.token_ids.shape), num_valid_tokens=int(mask.sum()))
    logits = decoder(batch).flatten(0, 1)[kept]
    decoder.loss_sum(masked, input_embeddings=embeddings).backward()
    return logits, embeddings.grad.flatten(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama_gqa_untied", "qwen3", "gpt2"])
def test_perturbing_one_document_leaves_the_others_alone_to_the_bit(family, layout, dtype):
    decoder = decoder_of(model_of(family), dtype)
    batch = packed_batch(LAYOUTS[layout])
    documents = documents_of(batch)
    for perturbed, kept in ((0, 1), (1, 0), (len(documents) - 1, 0), (0, len(documents) - 1)):
        first, last = documents[perturbed]
        token_ids = batch.token_ids.clone().flatten()
        token_ids[first:last] = (token_ids[first:last] + 1 + torch.arange(last - first)) % 61
        other = replace(batch, token_ids=token_ids.view(batch.token_ids.shape))
        place = slice(*documents[kept])
        logits, gradient = logits_and_embedding_gradient(decoder, batch, place)
        logits_after, gradient_after = logits_and_embedding_gradient(decoder, other, place)
        assert torch.equal(logits, logits_after)
        assert torch.equal(gradient[place], gradient_after[place])
        assert gradient[place].abs().sum() > 0
        outside = gradient.clone()
        outside[place] = 0
        assert outside.abs().max() == 0, "the loss of a document reaches another one"


def test_the_leak_probe_sees_a_leak():
    decoder = decoder_of(model_of("llama"))
    batch = packed_batch([[5, 19]])
    leaking = replace(batch, cu_seqlens=torch.tensor([0, 24], dtype=torch.int32))
    _, gradient = logits_and_embedding_gradient(decoder, leaking, slice(5, 24))
    assert gradient[:5].abs().max() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_separate_ones(family):
    decoder = decoder_of(model_of(family), torch.float64)
    batch = packed_batch(LAYOUTS["packed"])
    packed = decoder(batch).flatten(0, 1)
    for first, last in documents_of(batch):
        alone = Batch(
            token_ids=batch.token_ids.flatten()[None, first:last],
            labels=batch.labels.flatten()[None, first:last],
            loss_mask=batch.loss_mask.flatten()[None, first:last],
            position_ids=torch.arange(last - first)[None],
            cu_seqlens=torch.tensor([0, last - first], dtype=torch.int32),
            num_valid_tokens=0,
            sum_squared_lengths=(last - first) ** 2,
        )
        torch.testing.assert_close(packed[first:last], decoder(alone)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_attention_is_causal(family):
    decoder = decoder_of(model_of(family))
    batch = packed_batch([[24]])
    token_ids = batch.token_ids.clone()
    token_ids[0, 10] = (token_ids[0, 10] + 1) % 61
    before, after = decoder(batch)[0], decoder(replace(batch, token_ids=token_ids))[0]
    torch.testing.assert_close(before[:10], after[:10], rtol=0, atol=1e-6)
    assert (before[10:] - after[10:]).abs().amax(dim=-1).min() > 1e-4


def test_learned_positions_are_those_of_the_batch():
    decoder = decoder_of(model_of("gpt2"))
    batch = packed_batch([[12, 12]])
    counted_on = replace(batch, position_ids=torch.arange(24)[None])
    before, after = decoder(batch)[0], decoder(counted_on)[0]
    torch.testing.assert_close(before[:12], after[:12])
    assert (before[12:] - after[12:]).abs().max() > 1e-3


def test_rotary_positions_count_only_by_their_differences():
    decoder = decoder_of(model_of("llama"), torch.float64)
    batch = packed_batch([[12, 12]])
    shifted = replace(batch, position_ids=batch.position_ids + 7)
    stretched = replace(batch, position_ids=batch.position_ids * 2)
    torch.testing.assert_close(decoder(batch), decoder(shifted), rtol=1e-10, atol=1e-10)
    assert (decoder(batch) - decoder(stretched)).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama_gqa_untied", "qwen3", "gpt2"])
def test_the_micro_batch_split_does_not_change_summed_gradients(family):
    decoder = decoder_of(model_of(family), torch.float64)
    layouts = [[24], [5, 19], [12, 12], [1, 22, 1], [24], [7, 17], [3, 3, 18], [20, 4]]
    parts = [packed_batch([row], seed=index, valid=(index + 1) / 9) for index, row in enumerate(layouts)]
    assert len({part.num_valid_tokens for part in parts}) > 4, "the valid tokens are to be unequal"
    whole = gradients_of(decoder, joined(parts))
    for size in (1, 2, 4):
        split = [joined(parts[start : start + size]) for start in range(0, len(parts), size)]
        for name, gradient in gradients_of(decoder, *split).items():
            if name.endswith("attention.key.bias") and family == "gpt2":
                # A constant added to every key cancels in the softmax: this gradient is zero.
                assert gradient.norm() < 1e-12
                continue
            assert relative_difference(gradient, whole[name]) < 1e-12, name


def joined(parts: list[Batch]) -> Batch:
    length = parts[0].token_ids.shape[1]
    borders = [part.cu_seqlens[:-1] + index * length for index, part in enumerate(parts)]
    end = torch.tensor([len(parts) * length], dtype=torch.int32)
    return Batch(
        token_ids=torch.cat([part.token_ids for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        loss_mask=torch.cat([part.loss_mask for part in parts]),
        position_ids=torch.cat([part.position_ids for part in parts]),
        cu_seqlens=torch.cat([*borders, end]).to(torch.int32),
        num_valid_tokens=sum(part.num_valid_tokens for part in parts),
        sum_squared_lengths=sum(part.sum_squared_lengths for part in parts),
    )
