"""The bigram baseline: a distribution, and a strong one."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from drivetrain.errors import DataError
from drivetrain.measure.bigram import (  # the four methods, one at a time
    METHODS,
    Bigram,
    _Counts,
    _discounts,
    _mixture,
    fit_bigram,
    fit_bigram_pairs,
)


def markov_source(size: int, vocab_size: int, seed: int) -> tuple[NDArray[np.int64], float]:
    """Tokens of a random Markov chain, and its entropy rate in bits."""
    generator = np.random.default_rng(seed)
    rows = generator.dirichlet(np.full(vocab_size, 0.1), size=vocab_size)
    cumulative = rows.cumsum(axis=1)
    tokens = np.zeros(size, dtype=np.int64)
    draws = generator.random(size)
    for index in range(1, size):
        tokens[index] = min(np.searchsorted(cumulative[tokens[index - 1]], draws[index]), vocab_size - 1)
    stationary = np.bincount(tokens, minlength=vocab_size) / size
    entropy = -(stationary[:, None] * rows * np.log2(np.maximum(rows, 1e-300))).sum()
    return tokens, float(entropy)


def sums(bigram: Bigram) -> NDArray[np.float64]:
    """Sum of probabilities after each context."""
    size = bigram.vocab_size
    contexts, targets = np.divmod(np.arange(size * size), size)
    return bigram.probabilities(contexts, targets).reshape(size, size).sum(axis=1)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=120))
def test_probabilities_sum_to_one_after_every_context(tokens: list[int]) -> None:
    bigram = fit_bigram(np.array(tokens), vocab_size=9)
    assert np.allclose(sums(bigram), 1.0, atol=1e-12)
    assert bigram.probabilities(np.array([0] * 9), np.arange(9)).min() > 0


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=200),
    st.sampled_from(METHODS),
    st.floats(1e-6, 1.0),
    st.floats(0.001, 0.999),
)
def test_each_method_is_a_distribution(tokens: list[int], method: str, uniform: float, weight: float) -> None:
    ids = np.array(tokens, dtype=np.int64)
    counts = _Counts.of(ids[:-1], ids[1:], 7)
    contexts, targets = np.divmod(np.arange(49), 7)
    mixture = _mixture(counts, method, contexts, targets, np.full(64, weight), _discounts(counts, method))
    assert np.allclose(mixture.probabilities(uniform).reshape(7, 7).sum(axis=1), 1.0, atol=1e-12)


def test_on_a_markov_source_it_beats_unigrams_and_comes_near_the_entropy() -> None:
    tokens, entropy = markov_source(40_000, 32, seed=0)
    seen, unseen = tokens[:30_000], tokens[30_000:]
    bigram = fit_bigram(seen, 32)
    bits = bigram.bits(unseen[:-1], unseen[1:]) / (unseen.size - 1)
    frequencies = (np.bincount(seen, minlength=32) + 1) / (seen.size + 32)
    unigram_bits = -np.log2(frequencies[unseen[1:]]).mean()
    assert bits < 0.7 * unigram_bits
    assert bits < entropy * 1.03


def test_the_best_of_four_methods_is_taken() -> None:
    tokens, _ = markov_source(5_000, 64, seed=3)
    bigram = fit_bigram(tokens, 64)
    assert set(bigram.held_out_bits) == set(METHODS)
    assert bigram.held_out_bits[bigram.method] == min(bigram.held_out_bits.values())


def test_tokens_that_were_never_seen_stay_possible() -> None:
    bigram = fit_bigram(np.array([0, 1] * 200), 1000)
    assert 0 < bigram.probabilities(np.array([5]), np.array([7]))[0] < 0.01
    assert bigram.probabilities(np.array([0]), np.array([1]))[0] > 0.9


def test_bits_per_byte_counts_transitions_inside_documents_and_the_bytes_of_their_targets() -> None:
    bigram = fit_bigram(np.array([0, 1, 2, 3] * 50), 4)
    sizes = np.array([1, 2, 3, 0])
    documents = [np.array([0, 1, 2]), np.array([2]), np.array([1, 2, 3])]
    bits = bigram.bits(np.array([0, 1, 1, 2]), np.array([1, 2, 2, 3]))
    assert bigram.bits_per_byte(documents, sizes) == pytest.approx(bits / (2 + 3 + 3 + 0))
    pairs = bigram.bits_per_byte_of_pairs(np.array([0, 1, 1, 2]), np.array([1, 2, 2, 3]), sizes)
    assert pairs == bigram.bits_per_byte(documents, sizes)


def test_a_deterministic_cycle_costs_almost_nothing() -> None:
    bigram = fit_bigram(np.array([0, 1, 2, 3] * 500), 4)
    assert bigram.bits_per_byte([np.array([0, 1, 2, 3] * 10)], np.ones(4, dtype=int)) < 0.02


def test_uniform_noise_costs_about_the_logarithm_of_the_vocabulary() -> None:
    tokens = np.random.default_rng(0).integers(0, 16, 50_000)
    bigram = fit_bigram(tokens[:40_000], 16)
    unseen = tokens[40_000:]
    assert bigram.bits(unseen[:-1], unseen[1:]) / (unseen.size - 1) == pytest.approx(math.log2(16), rel=0.01)


def test_pairs_and_a_stream_of_tokens_give_the_same_model() -> None:
    tokens, _ = markov_source(2_000, 16, seed=1)
    one, other = fit_bigram(tokens, 16), fit_bigram_pairs(tokens[:-1], tokens[1:], 16)
    contexts, targets = np.divmod(np.arange(256), 16)
    assert np.array_equal(one.probabilities(contexts, targets), other.probabilities(contexts, targets))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: fit_bigram(np.array([3]), 4), "no tokens"),
        (lambda: fit_bigram(np.array([0, 4]), 4), "outside a vocabulary of 4"),
        (lambda: fit_bigram(np.array([0, -1]), 4), "outside a vocabulary of 4"),
        (lambda: fit_bigram_pairs(np.array([0, 1]), np.array([1]), 4), "pairs"),
        (
            lambda: fit_bigram(np.array([0, 1] * 9), 4).bits_per_byte([np.array([1])], np.ones(4)),
            "two tokens",
        ),
        (
            lambda: fit_bigram(np.array([0, 1] * 9), 4).bits_per_byte([np.array([0, 1])], np.zeros(4)),
            "no text",
        ),
    ],
)
def test_bad_input_is_named(action: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        action()
