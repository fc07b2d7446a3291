"""Samples of one corpus: which tokens the i-th sequence of a run holds.

The documents of a split fill rows of ``seq_length + 1`` tokens as ``data.packing`` says (:mod:`.rows`); each row but
its first token is predicted. Rows come in an order that is shuffled anew each epoch (held-out rows: always in order).
Sample i of a run is a function of the corpus, the configuration and i alone: not of ranks, workers, or where a run was
resumed.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drivetrain.config import DataConfig
from drivetrain.engine.data.baked import transform_to_apply
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.filling import PADDING, fill_tokens, mark_starts
from drivetrain.engine.data.fingerprint import combined_fingerprint
from drivetrain.engine.data.order import derive_key, permute
from drivetrain.engine.data.rows import Parts, rows_of
from drivetrain.engine.data.sample_cache import SampleCache
from drivetrain.engine.data.samples import Samples
from drivetrain.engine.data.split import Split, split_documents
from drivetrain.engine.data.timing import READ, SAMPLE_CACHE, OperationTimes
from drivetrain.engine.data.transform import TransformedDocuments, source_hash
from drivetrain.engine.data.warm_up import PageCache
from drivetrain.errors import DataError

__all__ = ["Sequences"]

WINDOW_KEY = 0x77696E646F77
BLOCK = 1024
"""Samples whose rows are looked up together."""
KEPT_BLOCKS = 2
UPCOMING = 64
"""Micro-batches of which is kept what was looked up ahead."""


class Sequences(Samples):
    """The samples of one split of a corpus. Picklable: a worker maps the corpus itself.

    Args:
        corpus: an opened corpus.
        data: split, packing, borders and transforms.
        split: ``train`` or ``validation``.
        seq_length: tokens in a sample.
        seed: of the order of training samples (:func:`drivetrain.config.data_seed`).
        times: by default its own.
    Attributes:
        num_samples: rows in one epoch.
        num_tokens: tokens of the split.
    Raises:
        DataError: too few tokens for one sample; a transform that cannot be found.
    """

    def __init__(
        self,
        corpus: Corpus,
        data: DataConfig,
        split: Split,
        seq_length: int,
        seed: int,
        times: OperationTimes | None = None,
    ) -> None:
        eod_id = corpus.eod_id
        padding_id = eod_id if eod_id is not None and 0 <= eod_id < corpus.vocab_size else 0
        super().__init__(data, split, seq_length, corpus.vocab_size, padding_id, times or OperationTimes())
        self.seed = seed
        self._eod_id = eod_id
        self._reader = corpus.reader
        transform = transform_to_apply(corpus, data)
        self._transformed = (
            TransformedDocuments(corpus.reader, transform, corpus.vocab_size, self.times)
            if transform is not None
            else None
        )
        self.is_baked = data.transform is not None and transform is None
        pieces = split_documents(corpus.reader.lengths(), data.split, split, seed)
        self.num_tokens = int(pieces.lengths.sum())
        self._rows = rows_of(pieces, data, seq_length)
        self.num_samples = self._rows.count
        self.padding_fraction = self._rows.padding_fraction
        if self.num_samples == 0:
            least = (
                f"one sample takes {seq_length + 1:,} (model.seq_length + 1)"
                if data.packing == "concatenate"
                else "one sample takes a document of two tokens"
            )
            raise DataError(
                f"the {split} split of {corpus.prefix!r} has {self.num_tokens:,} tokens in "
                f"{len(pieces):,} documents; {least}. Use a larger corpus, a shorter model.seq_length, "
                f"or another data.split (training,validation; now {data.split!r})"
            )
        # All that decides what row number i is, beside the code.
        self._identity = combined_fingerprint(
            *(corpus.fingerprint, split, data.split, str(seed), str(seq_length)),
            *(data.packing, str(data.packing_buffer), str(eod_id)),
            source_hash(transform) if transform is not None else "",
        )
        self._cache: SampleCache | None = None
        self._page_cache = PageCache(corpus.reader)
        self._blocks: dict[int, NDArray[np.int64]] = {}
        self._upcoming: dict[bytes, _Found] = {}

    def windows(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n,) int64 rows of the split that samples (n,) int64 of the run show."""
        if self.split == "validation":
            return samples % self.num_samples
        if not 0 < len(samples) <= BLOCK:
            return self._shuffled(samples)
        block = int(samples.max()) // BLOCK
        if int(samples.min()) // BLOCK != block:
            return self._shuffled(samples)
        # A permutation of many elements costs hardly more than one of few.
        if block not in self._blocks:
            if len(self._blocks) >= KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[block] = self._shuffled(
                np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.int64)
            )
        return self._blocks[block][samples - block * BLOCK]

    def _shuffled(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, within = np.divmod(samples, self.num_samples)
        result = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            key = derive_key(WINDOW_KEY, self.seed, int(epoch))
            result[chosen] = permute(within[chosen], self.num_samples, key)
        return result

    def rows(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        upcoming = self._upcoming.pop(samples.tobytes(), None)
        windows = self.windows(samples) if upcoming is None else upcoming.windows
        return self._read(windows, upcoming)

    def read(self, windows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens of rows (B,) int64 in ``[0, num_samples)``, and where documents start; as :meth:`rows`.

        A document starts where the index says so, or after an end-of-document id inside one.
        """
        return self._read(windows, None)

    def _read(
        self, windows: NDArray[np.int64], found: "_Found | None"
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        if self._cache is None:
            return self._built(self._find(windows) if found is None else found)
        shape = len(windows), self.seq_length + 1
        tokens, starts = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.bool_)
        with self.times.of(SAMPLE_CACHE):
            missing = [
                place
                for place, window in enumerate(windows.tolist())
                if not self._cache.get(window, tokens[place], starts[place])
            ]
        self.counts.cached += len(windows) - len(missing)
        if missing:
            tokens[missing], starts[missing] = self._built(self._find(windows[missing]))
            with self.times.of(SAMPLE_CACHE):
                for place in missing:
                    self._cache.put(int(windows[place]), tokens[place], starts[place])
        return tokens, starts

    def _find(self, windows: NDArray[np.int64]) -> "_Found":
        parts = self._rows.parts(windows)
        return _Found(windows, parts, self._reader.document_offsets[parts.documents] + parts.skips)

    def _built(self, found: "_Found") -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Rows out of documents; as :meth:`rows`."""
        parts = found.parts
        shape = len(found.windows), self.seq_length + 1
        self.counts.built += len(found.windows)
        with self.times.of(READ):
            tokens, starts = np.empty(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
            mark_starts(parts, starts)
            if self._transformed is None:
                fill_tokens(parts, self._reader.tokens, found.sources, tokens)
            else:
                self._fill_transformed(self._transformed, parts, tokens)
            if self._eod_id is not None:
                # Where an end-of-document id stands, the next token starts a document.
                starts[:, 1:] |= tokens[:, :-1] == self._eod_id
        return tokens, starts

    @staticmethod
    def _fill_transformed(transformed: TransformedDocuments, parts: Parts, tokens: NDArray[np.int64]) -> None:
        if bool((parts.ends < tokens.shape[1]).any()):
            tokens.fill(PADDING)
        columns = (parts.rows, parts.documents, parts.skips, parts.starts, parts.stops)
        for row, document, skip, start, stop in zip(*(one.tolist() for one in columns), strict=True):
            tokens[row, start:stop] = transformed.document(document)[skip : skip + stop - start]

    def contents(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        parts = self._rows.parts(self.windows(samples))
        return np.stack([parts.documents, parts.skips, parts.starts, parts.stops], axis=1)

    def use_cache(self, folder: Path, num_bytes: int) -> None:
        self._cache = SampleCache(
            folder, self._identity, self.seq_length + 1, self.num_samples, num_bytes=num_bytes
        )

    @property
    def caches(self) -> tuple[SampleCache, ...]:
        return () if self._cache is None else (self._cache,)

    def warm_up(self, samples: NDArray[np.int64]) -> None:
        found = self._find(self.windows(samples))
        # What to read ahead is what will be read: it is looked up once.
        if len(self._upcoming) >= UPCOMING:
            self._upcoming.clear()
        self._upcoming[samples.tobytes()] = found
        self._page_cache.will_need(found.sources, found.parts.stops - found.parts.starts)


@dataclass(frozen=True)
class _Found:
    """Where the tokens of some rows lie.

    Attributes:
        windows: (B,) int64 the rows.
        parts: what they hold.
        sources: (n,) int64 place in the corpus of the first token of each part.
    """

    windows: NDArray[np.int64]
    parts: Parts
    sources: NDArray[np.int64]
