"""Samples: every token once, borders, masks, positions."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain.config import DataConfig
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.sequences import Sequences
from drivetrain.engine.data.split import Split
from drivetrain.engine.model.batch import Batch, check_batch
from drivetrain.errors import DataError

WriteCorpus = Callable[..., str]
EVERYTHING = "100,0"
SPLITS: tuple[Split, Split] = ("train", "validation")


def sequences(
    corpus: Corpus, seq_length: int = 8, part: Split = "train", seed: int = 1, **data: object
) -> Sequences:
    return Sequences(corpus, DataConfig.model_validate(data), part, seq_length, seed)


@pytest.mark.parametrize("seq_length", [1, 3, 8, 31])
@pytest.mark.parametrize("part", SPLITS)
def test_every_token_is_predicted_once_an_epoch_but_the_first_and_a_tail(
    numbered_corpus: Corpus, seq_length: int, part: Split
) -> None:
    samples = sequences(numbered_corpus, seq_length, part, split="80,20")
    for epoch in range(2):
        order = np.arange(samples.num_samples) + epoch * samples.num_samples * (part == "train")
        labels = samples.batch(order).labels.flatten().tolist()
        assert len(labels) == len(set(labels)) == samples.num_samples * seq_length
        assert samples.num_tokens - 1 - len(labels) == (samples.num_tokens - 1) % seq_length


def test_training_and_held_out_text_share_no_token(numbered_corpus: Corpus) -> None:
    seen = []
    for part in SPLITS:
        samples = sequences(numbered_corpus, 4, part, split="80,20")
        batch = samples.batch(np.arange(samples.num_samples))
        seen.append(set(batch.labels.flatten().tolist()) | set(batch.token_ids.flatten().tolist()))
    assert not seen[0] & seen[1]


def test_epochs_and_seeds_are_ordered_differently_and_held_out_text_never(numbered_corpus: Corpus) -> None:
    samples = sequences(numbered_corpus)
    count = samples.num_samples
    first, second = (samples.windows(np.arange(count) + epoch * count) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(count))
    assert (first == second).mean() < 0.1
    assert first.tolist() != list(range(count))
    other = sequences(numbered_corpus, seed=2).windows(np.arange(count))
    assert other.tolist() != first.tolist()
    held_out = [sequences(numbered_corpus, 4, "validation", seed, split="50,50") for seed in (1, 2)]
    assert held_out[0].windows(np.arange(5)).tolist() == list(range(5))
    assert torch.equal(held_out[0].batch(np.arange(5)).labels, held_out[1].batch(np.arange(5)).labels)


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    seq_length=st.integers(1, 12),
    data=st.fixed_dictionaries(
        {name: st.booleans() for name in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")}
    ),
)
@settings(max_examples=80, suppress_health_check=list(HealthCheck))
def test_batches_of_any_documents_keep_every_promise(
    write_corpus: WriteCorpus, lengths: list[int], seq_length: int, data: dict[str, bool]
) -> None:
    documents, first = [], 1
    for length in lengths:
        documents.append(range(first, first + length))
        first += length
    if first - 1 < seq_length + 1:
        return
    corpus = Corpus.open(write_corpus(documents, vocab_size=first + 1), vocab_size=first + 1)
    samples = sequences(corpus, seq_length, split=EVERYTHING, **data)
    batch = samples.batch(np.arange(samples.num_samples))
    check_batch(batch, first + 1)
    # Ids rise by one inside a document, and documents are told apart by their ranges.
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    tokens, labels = (document_of[ids.flatten().numpy() - 1] for ids in (batch.token_ids, batch.labels))
    same = tokens == labels
    rows = np.arange(len(tokens)) % seq_length == 0
    starts = rows | np.r_[True, tokens[1:] != tokens[:-1]]
    assert np.array_equal(batch.labels.flatten().numpy()[same], batch.token_ids.flatten().numpy()[same] + 1)
    borders = starts if data["reset_attention_mask"] else rows
    assert batch.cu_seqlens.tolist() == [*np.flatnonzero(borders).tolist(), len(tokens)]
    assert batch.loss_mask.flatten().tolist() == (same if data["eod_mask_loss"] else same | True).tolist()
    zeros = starts if data["reset_position_ids"] else rows
    assert np.array_equal(batch.position_ids.flatten().numpy() == 0, zeros)


@pytest.fixture
def handcrafted(write_corpus: WriteCorpus) -> Corpus:
    """One document as another tool packs them: end-of-document id 9 inside, one row of 8 and a label."""
    corpus = Corpus.open(write_corpus([[1, 2, 9, 3, 4, 5, 9, 6, 7]], vocab_size=10), vocab_size=10)
    object.__setattr__(corpus, "eod_id", 9)
    return corpus


def only_row(corpus: Corpus, **data: object) -> Batch:
    return sequences(corpus, 8, split=EVERYTHING, **data).batch(np.array([0]))


def test_documents_packed_by_another_tool_are_parted_at_their_end_ids(handcrafted: Corpus) -> None:
    batch = only_row(handcrafted)
    assert batch.token_ids.tolist() == [[1, 2, 9, 3, 4, 5, 9, 6]]
    assert batch.labels.tolist() == [[2, 9, 3, 4, 5, 9, 6, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 8]
    assert batch.loss_mask.all()
    assert batch.num_valid_tokens == 8
    assert batch.sum_squared_lengths == 9 + 16 + 1


def test_the_token_after_an_end_of_document_carries_no_loss_when_asked(handcrafted: Corpus) -> None:
    batch = only_row(handcrafted, eod_mask_loss=True)
    assert batch.loss_mask.tolist() == [[True, True, False, True, True, True, False, True]]
    assert batch.num_valid_tokens == 6


def test_without_resets_a_row_is_one_document(handcrafted: Corpus) -> None:
    batch = only_row(handcrafted, reset_attention_mask=False, reset_position_ids=False)
    assert batch.cu_seqlens.tolist() == [0, 8]
    assert batch.position_ids.tolist() == [list(range(8))]
    assert batch.sum_squared_lengths == 64


def test_the_two_resets_do_not_depend_on_each_other(handcrafted: Corpus) -> None:
    batch = only_row(handcrafted, reset_attention_mask=False)
    assert batch.cu_seqlens.tolist() == [0, 8]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]


def test_held_out_samples_beyond_one_pass_carry_no_loss(numbered_corpus: Corpus) -> None:
    samples = sequences(numbered_corpus, 8, "validation", split="80,20")
    count = samples.num_samples
    batch = samples.batch(np.arange(count - 1, count + 2))
    assert batch.loss_mask.all(dim=1).tolist() == [True, False, False]
    assert batch.loss_mask.any(dim=1).tolist() == [True, False, False]
    assert batch.num_valid_tokens == 8


def test_too_few_tokens_for_a_sample_are_refused_with_the_figures(write_corpus: WriteCorpus) -> None:
    corpus = Corpus.open(write_corpus([range(8)]), vocab_size=100)
    with pytest.raises(DataError, match="has 8 tokens in 1 documents; one sample takes 9"):
        sequences(corpus, 8, split=EVERYTHING)
    assert sequences(corpus, 7, split=EVERYTHING).num_samples == 1
    with pytest.raises(DataError, match=r"validation split of .* has 0 tokens"):
        sequences(corpus, 7, "validation", split=EVERYTHING)
