"""The baseline a language model has to beat: an interpolated bigram model of the tokens it was trained on.

The probability of a token w after a token c is

    p(w | c) = a(c, w) + g(c) * ((1 - u) * q(w) + u / V)

with counted pairs in `a`, a lower-order distribution `q` and the uniform 1/V. Four known ways to choose
them are fitted, and the one under which a held-out part of the seen tokens is most likely is used:

* ``jelinek-mercer``: relative frequencies, weights by the context's count (Jelinek and Mercer 1980), by EM
* ``witten-bell``: weights from the number of different successors (Witten and Bell 1991)
* ``absolute-discount``: counts less a discount, unigrams below (Ney, Essen and Kneser 1994)
* ``kneser-ney``: the same with the number of different predecessors below (Kneser and Ney 1995), three
  discounts (Chen and Goodman 1998)

Numpy only; a few million tokens take seconds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.errors import DataError

__all__ = ["METHODS", "Bigram", "fit_bigram", "fit_bigram_pairs"]

METHODS = ("jelinek-mercer", "witten-bell", "absolute-discount", "kneser-ney")

_HELD_OUT_SHARE = 0.1
_BLOCKS = 20
"""Held-out tokens are taken from this many places, so that they are like the rest."""
_EM_ROUNDS = 40
_LEAST_UNIFORM = 1e-6
"""Least weight of the uniform part: every token stays possible."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Counts:
    """Sorted pair counts, and what follows from them for each token id (arrays of V)."""

    vocab_size: int
    keys: Ints
    """context * V + target of each different pair, ascending."""
    counts: Ints
    context_totals: Ints
    """How often an id is a context."""
    successors: Ints
    """How many different ids follow it."""
    target_totals: Ints
    predecessors: Ints

    @classmethod
    def of(cls, contexts: Ints, targets: Ints, vocab_size: int) -> "_Counts":
        keys, counts = np.unique(contexts * vocab_size + targets, return_counts=True)
        different_contexts, different_targets = np.divmod(keys, vocab_size)
        return cls(
            vocab_size=vocab_size,
            keys=keys,
            counts=counts.astype(np.int64),
            context_totals=np.bincount(contexts, minlength=vocab_size),
            successors=np.bincount(different_contexts, minlength=vocab_size),
            target_totals=np.bincount(targets, minlength=vocab_size),
            predecessors=np.bincount(different_targets, minlength=vocab_size),
        )

    def of_pairs(self, contexts: Ints, targets: Ints) -> Ints:
        """How often each of these pairs was seen."""
        if self.keys.size == 0:
            return np.zeros(contexts.shape, dtype=np.int64)
        wanted = contexts * self.vocab_size + targets
        places = np.minimum(np.searchsorted(self.keys, wanted), self.keys.size - 1)
        return np.where(self.keys[places] == wanted, self.counts[places], 0)


@dataclass(frozen=True)
class Bigram:
    """A fitted model. Made by `fit_bigram` or `fit_bigram_pairs`."""

    method: str
    """One of ``METHODS``: the one that explained the held-out tokens best."""
    held_out_bits: dict[str, float]
    """Bits per held-out token of each method."""
    uniform_weight: float
    """Share of the uniform in the lower-order distribution."""
    bucket_weights: Floats
    """Weight of the pair counts by log2 of the context's count (jelinek-mercer only)."""
    discounts: Floats
    """(4,) taken from counts of 0, 1, 2 and more (discounting methods only)."""
    _counts: _Counts

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._counts.vocab_size

    def probabilities(self, contexts: NDArray[Any], targets: NDArray[Any]) -> Floats:
        """p(target | context) of pairs of token ids, elementwise; fp64 of the same shape."""
        contexts, targets = _checked(contexts, targets, self.vocab_size)
        return self._mixture(contexts, targets).probabilities(self.uniform_weight)

    def bits(self, contexts: NDArray[Any], targets: NDArray[Any]) -> float:
        """Bits needed for all targets, each after its context."""
        return float(-np.log2(self.probabilities(contexts, targets)).sum())

    def bits_per_byte_of_pairs(
        self, contexts: NDArray[Any], targets: NDArray[Any], bytes_per_token: NDArray[Any]
    ) -> float:
        """Bits of the targets over the bytes of text they stand for.

        Give it the positions on which a model was scored (inputs and labels under the loss mask), and the
        two figures are comparable. A token of 0 bytes brings bits and no bytes.

        Args:
            contexts, targets: (n,) token ids.
            bytes_per_token: (V,) bytes each id stands for.

        Raises:
            DataError: the targets stand for no bytes at all.
        """
        text_bytes = int(np.asarray(bytes_per_token)[np.asarray(targets, dtype=np.int64)].sum())
        if text_bytes == 0:
            raise DataError("bits per byte of no bytes: the tokens to be scored stand for no text")
        return self.bits(contexts, targets) / text_bytes

    def bits_per_byte(self, documents: Iterable[NDArray[Any]], bytes_per_token: NDArray[Any]) -> float:
        """As `bits_per_byte_of_pairs` for whole documents.

        The first token of a document has no context inside it: neither its bits nor its bytes count.
        """
        pieces = [np.asarray(document, dtype=np.int64) for document in documents]
        contexts = [piece[:-1] for piece in pieces if piece.size > 1]
        targets = [piece[1:] for piece in pieces if piece.size > 1]
        if not contexts:
            raise DataError("bits per byte of no text: no document has two tokens")
        return self.bits_per_byte_of_pairs(np.concatenate(contexts), np.concatenate(targets), bytes_per_token)

    def _mixture(self, contexts: Ints, targets: Ints) -> "_Mixture":
        return _mixture(self._counts, self.method, contexts, targets, self.bucket_weights, self.discounts)


@dataclass(frozen=True)
class _Mixture:
    """The parts of p for a list of pairs: a, g, q (each (n,)) and V."""

    pair: Floats
    lower_weight: Floats
    lower: Floats
    vocab_size: int

    def probabilities(self, uniform_weight: float) -> Floats:
        lower = (1 - uniform_weight) * self.lower + uniform_weight / self.vocab_size
        probabilities: Floats = self.pair + self.lower_weight * lower
        return probabilities

    def best_uniform_weight(self) -> float:
        """EM for u, on the pairs this mixture belongs to."""
        weight = 0.05
        for _ in range(_EM_ROUNDS):
            uniform = self.lower_weight * weight / self.vocab_size
            known = self.lower_weight * (1 - weight) * self.lower
            total = self.pair + uniform + known
            uniform_share, known_share = float((uniform / total).sum()), float((known / total).sum())
            if uniform_share + known_share == 0:
                break
            weight = max(uniform_share / (uniform_share + known_share), _LEAST_UNIFORM)
        return min(weight, 1.0)


def fit_bigram(token_ids: NDArray[Any], vocab_size: int) -> Bigram:
    """Fit on a stream of seen tokens, (T,) ids in the order of the text: each is predicted from the last."""
    token_ids = np.asarray(token_ids).reshape(-1)
    return fit_bigram_pairs(token_ids[:-1], token_ids[1:], vocab_size)


def fit_bigram_pairs(contexts: NDArray[Any], targets: NDArray[Any], vocab_size: int) -> Bigram:
    """Fit on the positions a model was trained on: (n,) inputs and (n,) labels.

    A tenth of the pairs, from 20 places, chooses method and weights; then all pairs are counted.

    Raises:
        DataError: no pairs, arrays of different length, or an id outside the vocabulary.
    """
    contexts, targets = _checked(contexts, targets, vocab_size)
    if contexts.size == 0:
        raise DataError("a bigram model of no tokens: at least two seen tokens are needed")
    held_out = _held_out(contexts.size)
    fitted = _Counts.of(contexts[~held_out], targets[~held_out], vocab_size)
    candidates = [_fit(fitted, method, contexts[held_out], targets[held_out]) for method in METHODS]
    bits = {method: candidate[0] for method, candidate in zip(METHODS, candidates, strict=True)}
    best = min(range(len(METHODS)), key=lambda index: candidates[index][0])
    _, uniform_weight, bucket_weights = candidates[best]
    counts = _Counts.of(contexts, targets, vocab_size)
    return Bigram(
        method=METHODS[best],
        held_out_bits=bits,
        uniform_weight=uniform_weight,
        bucket_weights=bucket_weights,
        discounts=_discounts(counts, METHODS[best]),
        _counts=counts,
    )


def _checked(contexts: NDArray[Any], targets: NDArray[Any], vocab_size: int) -> tuple[Ints, Ints]:
    contexts = np.asarray(contexts, dtype=np.int64).reshape(-1)
    targets = np.asarray(targets, dtype=np.int64).reshape(-1)
    if contexts.size != targets.size:
        raise DataError(f"{contexts.size} contexts but {targets.size} targets: they are pairs")
    for ids in (contexts, targets):
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
            raise DataError(f"token ids {ids.min()} to {ids.max()} outside a vocabulary of {vocab_size}")
    return contexts, targets


def _held_out(size: int) -> NDArray[np.bool_]:
    """(size,) True for the last tenth of each of 20 stretches; where they are too short, of the whole."""
    stretch = max(math.ceil(size / _BLOCKS), 10)
    within = np.arange(size) % stretch
    return within >= stretch * (1 - _HELD_OUT_SHARE)


def _fit(counts: _Counts, method: str, contexts: Ints, targets: Ints) -> tuple[float, float, Floats]:
    """Bits per held-out token, weight of the uniform, and bucket weights of one method."""
    bucket_weights = np.full(64, 0.5)
    discounts = _discounts(counts, method)
    uniform_weight = 0.05
    if contexts.size == 0:
        return math.inf, uniform_weight, bucket_weights
    rounds = 3 if method == "jelinek-mercer" else 1
    for _ in range(rounds):
        mixture = _mixture(counts, method, contexts, targets, bucket_weights, discounts)
        uniform_weight = mixture.best_uniform_weight()
        if method == "jelinek-mercer":
            bucket_weights = _best_bucket_weights(counts, contexts, targets, uniform_weight)
    mixture = _mixture(counts, method, contexts, targets, bucket_weights, discounts)
    bits = float(-np.log2(mixture.probabilities(uniform_weight)).mean())
    return bits, uniform_weight, bucket_weights


def _mixture(
    counts: _Counts,
    method: str,
    contexts: Ints,
    targets: Ints,
    bucket_weights: Floats,
    discounts: Floats,
) -> _Mixture:
    pair_counts = counts.of_pairs(contexts, targets)
    totals = counts.context_totals[contexts].astype(np.float64)
    seen = np.maximum(totals, 1.0)
    below = counts.predecessors if method == "kneser-ney" else counts.target_totals
    lower = below[targets] / max(int(below.sum()), 1)
    if method == "jelinek-mercer":
        weight = np.where(totals > 0, bucket_weights[_buckets(totals)], 0.0)
        return _Mixture(weight * pair_counts / seen, 1 - weight, lower, counts.vocab_size)
    if method == "witten-bell":
        different = counts.successors[contexts]
        weight = np.where(totals > 0, totals / np.maximum(totals + different, 1.0), 0.0)
        return _Mixture(weight * pair_counts / seen, 1 - weight, lower, counts.vocab_size)
    kept = pair_counts - discounts[np.minimum(pair_counts, 3)]
    freed = _freed_mass(counts, discounts)[contexts]
    lower_weight = np.where(totals > 0, freed / seen, 1.0)
    return _Mixture(kept / seen, lower_weight, lower, counts.vocab_size)


def _freed_mass(counts: _Counts, discounts: Floats) -> Floats:
    """(V,) what the discounts take from each context's counts altogether."""
    per_pair = discounts[np.minimum(counts.counts, 3)]
    contexts = counts.keys // counts.vocab_size
    return np.asarray(np.bincount(contexts, weights=per_pair, minlength=counts.vocab_size), np.float64)


def _discounts(counts: _Counts, method: str) -> Floats:
    """(4,) discounts of counts 0, 1, 2, 3 and more; Chen and Goodman's closed form from counts of counts."""
    once, twice, thrice, four = (float((counts.counts == number).sum()) for number in (1, 2, 3, 4))
    base = once / (once + 2 * twice) if once else 0.0
    if method != "kneser-ney":
        return np.array([0.0, base, base, base])

    def discount(number: int, these: float, next_ones: float) -> float:
        value = number - (number + 1) * base * next_ones / these if these else base
        return min(max(value, 0.0), float(number))

    return np.array([0.0, discount(1, once, twice), discount(2, twice, thrice), discount(3, thrice, four)])


def _buckets(totals: Floats) -> Ints:
    """Bucket of a context by its count: 0 for 1, 1 for 2-3, 2 for 4-7 …"""
    return np.log2(np.maximum(totals, 1.0)).astype(np.int64)


def _best_bucket_weights(counts: _Counts, contexts: Ints, targets: Ints, uniform_weight: float) -> Floats:
    """EM for the weight of the pair counts in each bucket of context counts; (64,)."""
    ones = np.ones(64)
    all_pair = _mixture(counts, "jelinek-mercer", contexts, targets, ones, ones).pair
    no_pair = _mixture(counts, "jelinek-mercer", contexts, targets, ones * 0, ones)
    lower = no_pair.probabilities(uniform_weight)
    seen = counts.context_totals[contexts] > 0
    buckets = _buckets(counts.context_totals[contexts].astype(np.float64))[seen]
    pair, below = all_pair[seen], lower[seen]
    observed = np.bincount(buckets, minlength=64)
    weights = np.full(64, 0.5)
    for _ in range(_EM_ROUNDS):
        share = weights[buckets] * pair
        total = share + (1 - weights[buckets]) * below
        taken = np.bincount(buckets, weights=share / total, minlength=64)
        weights = np.where(observed > 0, taken / np.maximum(observed, 1), weights)
        # A bucket that held-out tokens fall into rarely must not become certain of itself.
        weights = np.clip(weights, 0.001, 0.999)
    return weights
