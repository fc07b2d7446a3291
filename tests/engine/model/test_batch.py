"""The batch and its checks."""

from dataclasses import replace

import pytest
import torch
from model_examples import packed_batch

from drivetrain.engine.model.batch import check_batch, documents_of, whole_sequences


def test_documents_are_read_off_the_cumulative_lengths():
    assert documents_of(packed_batch([[3, 5], [8], [1, 7]])) == [(0, 3), (3, 8), (8, 16), (16, 17), (17, 24)]


def test_moving_a_batch_leaves_the_document_borders_on_the_host():
    moved = packed_batch([[3, 5]]).to("meta")
    assert moved.cu_seqlens.device.type == "cpu"
    tensors = (moved.token_ids, moved.labels, moved.loss_mask, moved.position_ids)
    assert all(tensor.device.type == "meta" for tensor in tensors)


def test_whole_sequences_are_one_document_a_row_and_predict_the_next_token():
    batch = whole_sequences(torch.tensor([[5, 6, 7], [1, 2, 3]]))
    check_batch(batch, vocab_size=8)
    assert documents_of(batch) == [(0, 3), (3, 6)]
    assert batch.labels[:, :-1].tolist() == [[6, 7], [2, 3]]
    assert batch.loss_mask.tolist() == [[True, True, False]] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 3, 7], dtype=torch.int32)}, "end at 7 of 16"),
        ({"cu_seqlens": torch.tensor([0, 3, 16], dtype=torch.int32)}, "crosses a sequence border"),
        ({"cu_seqlens": torch.tensor([0, 8, 8, 16], dtype=torch.int32)}, "empty document"),
        ({"cu_seqlens": torch.tensor([0, 8, 16])}, "int64"),
        ({"num_valid_tokens": 1}, "num_valid_tokens"),
        ({"sum_squared_lengths": 1}, "sum_squared_lengths"),
        ({"loss_mask": torch.ones(2, 8)}, "float32"),
        ({"labels": torch.full((2, 8), -100)}, "labels holds -100"),
    ],
)
def test_a_broken_promise_is_named(change, message):
    with pytest.raises(AssertionError, match=message):
        check_batch(replace(packed_batch([[3, 5], [8]]), **change), vocab_size=61)
