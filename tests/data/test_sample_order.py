"""Orders: permutations that depend on nothing but their key; splits that are disjoint and covering."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.data.order import derive_key, hash64, permute, shuffled
from drivetrain.engine.data.split import split_documents
from drivetrain.errors import DataError


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


def test_an_element_of_a_permutation_is_found_without_the_others() -> None:
    whole = permute(np.arange(1000), 1000, 7)
    assert permute(np.array([123, 999]), 1000, 7).tolist() == [whole[123], whole[999]]
    assert permute(np.array([2**40 + 5]), 2**41, 7).shape == (1,)


def test_orders_of_other_keys_differ_and_mix() -> None:
    first, second = (permute(np.arange(1000), 1000, derive_key(1, epoch)) for epoch in (0, 1))
    assert (first == second).sum() < 20
    # The expected distance of two random places of 1000 is 333.
    assert 280 < np.abs(first - np.arange(1000)).mean() < 390
    assert derive_key(1, 2) != derive_key(2, 1)


def test_the_order_is_the_same_in_every_version() -> None:
    # Recorded: a resumed run must see the order it began with, whatever numpy it is resumed under.
    assert permute(np.arange(8), 8, 42).tolist() == [6, 4, 5, 0, 7, 3, 2, 1]
    assert shuffled(8, 42).tolist() == [4, 2, 0, 1, 7, 5, 3, 6]


def tokens_of(lengths: np.ndarray, weights: str, split: str, seed: int = 1) -> set[tuple[int, int]]:
    pieces = split_documents(lengths, weights, split, seed)  # type: ignore[arg-type]
    tokens = [
        (document, position)
        for document, skip, length in zip(
            pieces.documents.tolist(), pieces.skips.tolist(), pieces.lengths.tolist(), strict=True
        )
        for position in range(skip, skip + length)
    ]
    assert len(tokens) == len(set(tokens))
    assert all(length >= 1 for length in pieces.lengths.tolist())
    return set(tokens)


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    weights=st.sampled_from(["95,5", "50,50", "1,3", "0.9,0.1", "100,0", "0,1"]),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=150, deadline=None)
def test_splits_share_no_token_and_cover_all(lengths: list[int], weights: str, seed: int) -> None:
    array = np.array(lengths, dtype=np.int64)
    train = tokens_of(array, weights, "train", seed)
    validation = tokens_of(array, weights, "validation", seed)
    assert not train & validation
    assert train | validation == {(d, p) for d, length in enumerate(lengths) for p in range(length)}


def test_held_out_text_has_its_share_and_does_not_depend_on_the_seed() -> None:
    lengths = np.full(1000, 10)
    pieces = [split_documents(lengths, "95,5", "validation", seed) for seed in (1, 2)]
    assert int(pieces[0].lengths.sum()) == 500
    assert pieces[0].documents.tolist() == pieces[1].documents.tolist()
    orders = [split_documents(lengths, "95,5", "train", seed).documents.tolist() for seed in (1, 2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_many_documents_are_never_cut() -> None:
    lengths = np.arange(1, 400)
    for split in ("train", "validation"):
        pieces = split_documents(lengths, "90,10", split, 1)  # type: ignore[arg-type]
        assert not pieces.skips.any()
        assert np.array_equal(pieces.lengths, lengths[pieces.documents])


def test_a_single_document_is_cut_so_that_there_is_held_out_text() -> None:
    lengths = np.array([1000])
    train = split_documents(lengths, "95,5", "train", 1)
    validation = split_documents(lengths, "95,5", "validation", 1)
    assert train.lengths.tolist() == [950]
    assert (validation.skips.tolist(), validation.lengths.tolist()) == ([950], [50])


def test_weights_of_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="neither"):
        split_documents(np.array([10]), "0,0", "train", 1)


@given(parts=st.lists(st.integers(-(2**63), 2**64), max_size=3), last=st.integers(0, 2**64 - 1))
def test_keys_are_the_hash_of_their_parts(parts: list[int], last: int) -> None:
    expected = int(hash64(np.array([last], dtype=np.uint64), derive_key(*parts))[0])
    assert derive_key(*parts, last) == expected
