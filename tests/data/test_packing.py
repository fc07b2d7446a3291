"""Packing: whole documents in rows of one length, every prediction made once, padding that nobody learns from."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain.config import DataConfig
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.packing import best_fit, cut_to_length
from drivetrain.engine.data.sequences import Sequences
from drivetrain.engine.data.split import Pieces
from drivetrain.engine.model.batch import check_batch, documents_of

WriteCorpus = Callable[..., str]
EVERYTHING = "100,0"
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def pieces_of(lengths: list[int]) -> Pieces:
    count = len(lengths)
    return Pieces(np.arange(count), np.zeros(count, np.int64), np.array(lengths, dtype=np.int64))


def sequences(corpus: Corpus, packing: str, seq_length: int = 8, **data: object) -> Sequences:
    config = DataConfig.model_validate({"packing": packing, "split": EVERYTHING, **data})
    return Sequences(corpus, config, "train", seq_length, 1)


@given(lengths=LENGTHS, seq_length=st.integers(1, 12))
def test_long_documents_are_cut_so_that_each_token_but_the_first_is_predicted_once(
    lengths: list[int], seq_length: int
) -> None:
    cut = cut_to_length(pieces_of(lengths), seq_length)
    assert all(2 <= length <= seq_length + 1 for length in cut.lengths.tolist())
    predicted = [
        (document, skip + place)
        for document, skip, length in zip(
            cut.documents.tolist(), cut.skips.tolist(), cut.lengths.tolist(), strict=True
        )
        for place in range(1, length)
    ]
    assert predicted == [(d, place) for d, length in enumerate(lengths) for place in range(1, length)]


@given(lengths=LENGTHS, capacity=st.integers(40, 100), buffer=st.integers(1, 70))
def test_every_piece_is_in_one_row_and_no_row_overflows(
    lengths: list[int], capacity: int, buffer: int
) -> None:
    array = np.array(lengths)
    packed = best_fit(array, capacity, buffer)
    assert sorted(packed.order.tolist()) == list(range(len(lengths)))
    assert packed.first[0] == 0
    assert packed.first[-1] == len(lengths)
    for start, stop in zip(packed.first[:-1].tolist(), packed.first[1:].tolist(), strict=True):
        row = packed.order[start:stop]
        assert 0 < array[row].sum() <= capacity
        assert len(set((row // buffer).tolist())) == 1, "pieces of different buffers share a row"


@given(lengths=st.lists(st.integers(2, 30), min_size=2, max_size=80))
def test_a_piece_opens_a_row_only_where_no_row_holds_it(lengths: list[int]) -> None:
    """The bound that best-fit decreasing keeps, by comparison with the definition, piece by piece."""
    capacity = 30
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length and room >= 2]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    packed = best_fit(np.array(lengths), capacity, len(lengths))
    array = np.array(lengths)
    found = [
        capacity - int(array[packed.order[start:stop]].sum())
        for start, stop in zip(packed.first[:-1].tolist(), packed.first[1:].tolist(), strict=True)
    ]
    assert sorted(found) == sorted(rooms)


def test_rows_are_the_same_in_every_version() -> None:
    # Recorded: a resumed run must see the rows it began with.
    packed = best_fit(np.array([5, 3, 7, 2, 9, 4, 6, 10, 2]), 10, 6)
    assert packed.order.tolist() == [4, 2, 1, 0, 5, 3, 7, 6, 8]
    assert packed.first.tolist() == [0, 1, 3, 5, 6, 7, 9]


@pytest.mark.parametrize(("median", "spread"), [(300, 1.0), (600, 1.2), (150, 0.8)])
def test_log_normal_documents_fill_99_of_100_places(median: int, spread: float) -> None:
    random = np.random.default_rng(3)
    lengths = np.maximum(2, random.lognormal(np.log(median), spread, 20_000)).astype(np.int64)
    cut = cut_to_length(pieces_of(lengths.tolist()), 2048)
    packed = best_fit(cut.lengths, 2049, DataConfig().packing_buffer)
    rows = len(packed.first) - 1
    assert cut.lengths.sum() / (rows * 2049) >= 0.99


@given(
    lengths=LENGTHS,
    seq_length=st.integers(1, 12),
    packing=st.sampled_from(["best_fit", "pad"]),
    reset=st.booleans(),
)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_an_epoch_predicts_every_token_but_the_first_of_each_document_once_and_from_its_own_document(
    write_corpus: WriteCorpus, lengths: list[int], seq_length: int, packing: str, reset: bool
) -> None:
    documents, first = [], 1
    for length in lengths:
        documents.append(range(first, first + length))
        first += length
    if max(lengths) < 2:
        return
    corpus = Corpus.open(write_corpus(documents, vocab_size=first), vocab_size=first)
    samples = sequences(corpus, packing, seq_length, reset_attention_mask=reset)
    batch = samples.batch(np.arange(samples.num_samples))
    check_batch(batch, first)
    labels = batch.labels[batch.loss_mask].tolist()
    heads = {document[0] for document in documents}
    assert sorted(labels) == [token for token in range(1, first) if token not in heads]
    # Ids rise by one inside a document.
    assert (batch.labels - batch.token_ids)[batch.loss_mask].eq(1).all()
    assert batch.num_valid_tokens == len(labels)
    if reset:
        held = {bounds[0] for bounds in documents_of(batch)}
        row = batch.token_ids.flatten().tolist()
        assert all(
            place in held
            for place, token in enumerate(row)
            if token in heads and batch.loss_mask.flatten()[place]
        )


def test_documents_that_fit_a_sequence_are_never_cut(numbered_corpus: Corpus) -> None:
    samples = sequences(numbered_corpus, "best_fit", 40)
    batch = samples.batch(np.arange(samples.num_samples))
    rows = batch.token_ids.tolist()
    labels = batch.labels.tolist()
    whole = 0
    for document in numbered_corpus.reader:
        ids = document.tolist()
        if len(ids) >= 2:
            assert (
                sum(
                    ids == [*row, last[-1]][at : at + len(ids)]
                    for row, last in zip(rows, labels, strict=True)
                    for at in range(42 - len(ids))
                )
                == 1
            )
            whole += 1
    assert whole > 50


def test_padding_is_a_document_of_its_own_without_loss(write_corpus: WriteCorpus) -> None:
    corpus = Corpus.open(write_corpus([[1, 2, 3], [4, 5]]), vocab_size=100)
    samples = sequences(corpus, "pad", 5)
    assert samples.num_samples == 2
    assert samples.padding_fraction == pytest.approx(7 / 12)
    batch = samples.batch(np.arange(2))
    by_first = {row[0]: index for index, row in enumerate(batch.token_ids.tolist())}
    row = by_first[1]
    assert batch.token_ids[row].tolist() == [1, 2, 3, 0, 0]
    assert batch.loss_mask[row].tolist() == [True, True, False, False, False]
    assert batch.position_ids[row].tolist() == [0, 1, 2, 0, 1]
    assert (row * 5 + 3) in batch.cu_seqlens.tolist()
    assert batch.num_valid_tokens == 3


def test_packing_leaves_less_padding_than_one_document_a_row(numbered_corpus: Corpus) -> None:
    padded, packed = (sequences(numbered_corpus, packing, 40) for packing in ("pad", "best_fit"))
    assert sequences(numbered_corpus, "concatenate", 40).padding_fraction == 0
    assert packed.padding_fraction < 0.05 < 0.4 < padded.padding_fraction
    assert packed.num_samples < padded.num_samples
