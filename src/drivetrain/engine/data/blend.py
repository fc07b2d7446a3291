"""Several corpora mixed by weights: which sample of which corpus the i-th sample of a run is.

The weights become a pattern of ``period`` samples, in which each corpus comes as often as its weight says, and at
each place the one that is furthest behind its share; the pattern is repeated. So any sample is found in a few
operations, and after n samples no corpus is two samples away from n times its share. Each corpus has epochs of its
own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drivetrain.addresses import withheld
from drivetrain.config import DataConfig
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.fingerprint import combined_fingerprint
from drivetrain.engine.data.order import derive_key
from drivetrain.engine.data.progress import Progress, ProgressCallback, silent
from drivetrain.engine.data.sample_cache import SampleCache
from drivetrain.engine.data.samples import Samples
from drivetrain.engine.data.sequences import Sequences
from drivetrain.engine.data.split import Split
from drivetrain.engine.data.timing import OperationTimes
from drivetrain.errors import DataError

__all__ = ["LONGEST_PERIOD", "BlendedCorpus", "BlendedSamples", "Mixture"]

LONGEST_PERIOD = 1 << 16
"""Weights that need a longer pattern are rounded to one of this length: a share is off by less than 1 in 65,536."""
PART_KEY = 0x626C656E64


class Mixture:
    """The order in which several sources take turns.

    Args:
        weights: of the sources, above 0.
    Attributes:
        counts: how often each comes in one period.
        period: samples after which the pattern is repeated.
        exact: whether ``counts`` have exactly the ratio of the weights.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        assert weights
        assert all(weight > 0 for weight in weights)
        self.counts, self.exact = _whole_counts(weights)
        self.period = sum(self.counts)
        self._source, self._rank = _largest_deficit_first(self.counts)

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source of samples (n,) int64, and how many of the same source come before each; (n,) int64 each."""
        periods, places = np.divmod(samples, self.period)
        source = self._source[places]
        return source, periods * np.array(self.counts, dtype=np.int64)[source] + self._rank[places]

    def used(self, samples: int) -> list[int]:
        """How many of the first ``samples`` each source gives."""
        periods, rest = divmod(samples, self.period)
        begun = np.bincount(self._source[:rest], minlength=len(self.counts))
        return [periods * count + int(more) for count, more in zip(self.counts, begun, strict=True)]

    def longest_without_repeat(self, available: Sequence[int]) -> int:
        """The largest number of samples for which no source gives more than there are."""
        low, high = 0, sum(available) + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = all(used <= most for used, most in zip(self.used(middle), available, strict=True))
            low, high = (middle, high) if fits else (low, middle)
        return low


def _whole_counts(weights: Sequence[Fraction]) -> tuple[list[int], bool]:
    common = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * common) for weight in weights]
    divisor = math.gcd(*whole)
    whole = [count // divisor for count in whole]
    if sum(whole) <= LONGEST_PERIOD:
        return whole, True
    total = sum(whole)
    # By largest remainder, and each at least once: a source that was asked for is never left out.
    shares = [Fraction(count * LONGEST_PERIOD, total) for count in whole]
    counts = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda one: (int(shares[one]) - shares[one], one))
    for one in by_remainder[: max(0, LONGEST_PERIOD - sum(counts))]:
        counts[one] += 1
    return counts, False


def _largest_deficit_first(counts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source at each place of one period, and how often it came before."""
    period = sum(counts)
    source = np.empty(period, dtype=np.int64)
    rank = np.empty(period, dtype=np.int64)
    given = [0] * len(counts)
    # deficit = share * (place + 1) - given, times the period; whole numbers, so that no rounding decides.
    deficits = [0] * len(counts)
    for place in range(period):
        for one, count in enumerate(counts):
            deficits[one] += count
        chosen = deficits.index(max(deficits))
        deficits[chosen] -= period
        source[place], rank[place] = chosen, given[chosen]
        given[chosen] += 1
    return source, rank


@dataclass(frozen=True, eq=False)
class BlendedCorpus(Corpus):
    """Several corpora as one: tokens and documents are those of :attr:`parts`; ``reader`` is the first one's.

    Attributes:
        parts: the corpora.
        weights: their shares, as they were written.
    """

    parts: tuple[Corpus, ...] = ()
    weights: tuple[Fraction, ...] = ()

    @classmethod
    def of(
        cls,
        data_path: str,
        parts: Sequence[Corpus],
        weights: Sequence[Fraction],
        progress: ProgressCallback = silent,
    ) -> "BlendedCorpus":
        """The blend of opened corpora.

        Args:
            progress: told of corpora whose tokenizer nobody knows.
        Raises:
            DataError: they were made with different tokenizers.
        """
        _require_one_tokenizer(parts, progress)
        first = parts[0]
        with_tokenizer = next((part for part in parts if part.tokenizer is not None), first)
        meta = first.meta.model_copy(
            update={
                "documents": sum(part.meta.documents for part in parts),
                "tokens": sum(part.meta.tokens for part in parts),
                "max_id": max(part.meta.max_id for part in parts),
            }
        )
        described = (f"{weight} {part.fingerprint}" for part, weight in zip(parts, weights, strict=True))
        return cls(
            prefix=withheld(data_path),
            reader=first.reader,
            meta=meta,
            tokenizer=with_tokenizer.tokenizer,
            tokenizer_file=with_tokenizer.tokenizer_file,
            fingerprint=combined_fingerprint(*described),
            eod_id=first.eod_id,
            vocab_size=max(part.vocab_size for part in parts),
            parts=tuple(replace(part, vocab_size=max(one.vocab_size for one in parts)) for part in parts),
            weights=tuple(weights),
        )


def _require_one_tokenizer(parts: Sequence[Corpus], progress: ProgressCallback) -> None:
    known = [part for part in parts if part.meta.tokenizer_sha256 is not None]
    for part in known[1:]:
        if part.meta.tokenizer_sha256 != known[0].meta.tokenizer_sha256:
            raise DataError(
                f"{known[0].prefix!r} and {part.prefix!r} were prepared with different tokenizers: their ids do "
                "not mean the same; prepare one of them again with the other's (`data prepare --tokenizer`)"
            )
    unknown = [repr(part.prefix) for part in parts if part.meta.tokenizer_sha256 is None]
    if unknown:
        progress(
            Progress(
                f"a blend of corpora of which {', '.join(unknown)} do not say what tokenizer made them: "
                "whether an id means the same in all of them was not checked"
            )
        )


class BlendedSamples(Samples):
    """The samples of one split of a blend.

    A pass over training data is as many samples as its corpora have together; over held-out text, as many as the
    pattern gives before the first corpus would be read a second time.

    Args:
        corpus: the blend.
        data, split, seq_length, seed: as for :class:`.Sequences`.
    Attributes:
        parts: samples of each corpus.
        mixture: their order.
    Raises:
        DataError: a corpus has too few tokens for one sample; a transform that cannot be found.
    """

    def __init__(
        self, corpus: BlendedCorpus, data: DataConfig, split: Split, seq_length: int, seed: int
    ) -> None:
        times = OperationTimes()
        # Corpora of equal size would else be shuffled alike.
        self.parts = [
            Sequences(part, data, split, seq_length, derive_key(PART_KEY, seed, number) >> 1, times)
            for number, part in enumerate(corpus.parts)
        ]
        super().__init__(data, split, seq_length, corpus.vocab_size, self.parts[0].padding_id, times)
        self.is_baked = any(part.is_baked for part in self.parts)
        self.mixture = Mixture(corpus.weights)
        available = [part.num_samples for part in self.parts]
        self.num_samples = sum(available)
        if split == "validation":
            self.num_samples = self.mixture.longest_without_repeat(available)
            if self.num_samples == 0:
                raise DataError(
                    f"the held-out text of {corpus.prefix!r} has no sample in the ratio of its weights"
                )
        self.num_tokens = sum(part.num_tokens for part in self.parts)
        shares = np.array(self.mixture.counts) / self.mixture.period
        self.padding_fraction = float(shares @ [part.padding_fraction for part in self.parts])

    def rows(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        tokens = np.empty((len(samples), self.seq_length + 1), dtype=np.int64)
        starts = np.empty((len(samples), self.seq_length + 1), dtype=np.bool_)
        for part, places, within in self._by_part(samples):
            tokens[places], starts[places] = part.rows(within)
            self.counts.built += part.counts.built
            self.counts.cached += part.counts.cached
            part.counts.take()
        return tokens, starts

    def _by_part(
        self, samples: NDArray[np.int64]
    ) -> list[tuple[Sequences, NDArray[np.intp], NDArray[np.int64]]]:
        source, within = self.mixture.locate(samples)
        found = []
        for number, part in enumerate(self.parts):
            places = np.flatnonzero(source == number)
            if len(places):
                # Held-out samples beyond the pass only fill a batch: any will do.
                number_within = within[places]
                if self.split == "validation":
                    number_within = number_within % part.num_samples
                found.append((part, places, number_within))
        return found

    def contents(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        parts = [part.contents(within) for part, _, within in self._by_part(samples)]
        source, within = self.mixture.locate(samples)
        return np.concatenate([np.concatenate([source, within]), *(one.ravel() for one in parts)])[:, None]

    def use_cache(self, folder: Path, num_bytes: int) -> None:
        for part, count in zip(self.parts, self.mixture.counts, strict=True):
            part.use_cache(folder, num_bytes * count // self.mixture.period)

    @property
    def caches(self) -> list[SampleCache]:
        return [cache for part in self.parts for cache in part.caches]

    def warm_up(self, samples: NDArray[np.int64]) -> None:
        for part, _, within in self._by_part(samples):
            part.warm_up(within)
