"""What a corpus holds, for a person or a program to look at before training on it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from drivetrain.addresses import withheld
from drivetrain.config import DataConfig
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.progress import Progress, ProgressCallback, silent
from drivetrain.engine.data.remote.cache import remote_cache
from drivetrain.engine.data.remote.inputs import bring_corpus
from drivetrain.engine.data.remote.store import is_url
from drivetrain.engine.data.split import split_documents

__all__ = ["inspect_corpus"]

SAMPLE_TOKENS = 80
NUM_SAMPLES = 3
CHUNK_TOKENS = 1 << 24
COUNTED_TOKENS = 1 << 30
"""Of a larger corpus, ids are counted in blocks at equal distances that add up to this."""
MOST_FREQUENT = 10
PERCENTILES = (1, 10, 25, 50, 75, 90, 99)


def inspect_corpus(
    prefix: str | Path,
    tokenizer_path: str | Path | None = None,
    progress: ProgressCallback = silent,
    *,
    vocab_size: int | None = None,
    split: str = DataConfig.model_fields["split"].default,
    cache_bytes: int | None = None,
) -> dict[str, Any]:
    """Facts of a corpus as one JSON-able document; unknown ones are None.

    ``document_length`` is in tokens; ``eod_tokens`` counts the end-of-document id in what was counted, and
    ``documents_ending_with_eod`` is the share of documents whose last token it is.

    Args:
        prefix, tokenizer_path: see ``Corpus.open``; of a URL the files are brought here first.
        progress: called as the work proceeds.
        vocab_size: refuse ids that are not below it.
        split: ``data.split``, to count what a run would train on and hold out.
        cache_bytes: most bytes on disk of what URLs name; by default as ``data.remote_cache_bytes``.
    Raises:
        DataError: a damaged corpus; an id outside the vocabulary.
    """
    if is_url(prefix):
        brought = bring_corpus(str(prefix), remote_cache(num_bytes=cache_bytes), progress)
        try:
            found = inspect_corpus(brought.path, tokenizer_path, progress, vocab_size=vocab_size, split=split)
        finally:
            brought.close()
        return {**found, "prefix": withheld(str(prefix))}
    corpus = Corpus.open(prefix, tokenizer_path, vocab_size=vocab_size, progress=progress)
    reader, meta = corpus.reader, corpus.meta
    all_lengths = reader.lengths()
    filled = np.flatnonzero(all_lengths > 0)
    lengths = all_lengths[filled]
    byte_lengths = corpus.token_byte_lengths()
    counted = _count_ids(corpus, progress)
    samples = [_sample(corpus, int(filled[at])) for at in _spread(len(filled), NUM_SAMPLES)]
    return {
        "schema": 1,
        "prefix": corpus.prefix,
        "format": reader.format,
        "dtype": reader.dtype.name,
        "documents": reader.num_documents,
        "empty_documents": reader.num_documents - len(lengths),
        "sequences": reader.num_sequences,
        "tokens": reader.num_tokens,
        "document_length": {
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": float(lengths.mean()),
            "max": int(lengths.max()),
        },
        "document_length_percentiles": {
            str(share): float(value)
            for share, value in zip(PERCENTILES, np.percentile(lengths, PERCENTILES), strict=True)
        },
        "document_length_histogram": _by_powers_of_two(lengths),
        "max_id": meta.max_id,
        "smallest_vocab_size": meta.max_id + 1,
        "ids": counted.document(corpus.tokenizer, meta.max_id + 1),
        **_end_of_documents(corpus, counted, filled),
        "split": {split: _split(all_lengths, split)},
        "text_bytes": meta.text_bytes,
        "bytes_per_token": meta.text_bytes / reader.num_tokens if meta.text_bytes is not None else None,
        "bits_per_byte_available": byte_lengths.values is not None,
        "bits_per_byte_reason": byte_lengths.reason or None,
        "tokenizer": str(corpus.tokenizer_file) if corpus.tokenizer_file is not None else None,
        "tokenizer_vocab_size": meta.vocab_size,
        "origin": meta.origin,
        "sources": list(meta.sources),
        "skipped": meta.skipped,
        "duplicates": meta.duplicates,
        "fingerprint": corpus.fingerprint,
        "samples": samples,
        "first_sample": samples[0],
    }


@dataclass(frozen=True)
class _Counted:
    """How often each id occurs in ``tokens`` tokens of the corpus."""

    counts: NDArray[np.int64]
    tokens: int

    def document(self, tokenizer: Tokenizer | None, ids: int) -> dict[str, Any]:
        """Summary: the most frequent ids, how many occur at all, how much of all tokens few ids make up."""
        used = np.flatnonzero(self.counts)
        order = np.lexsort((used, -self.counts[used]))
        ordered = used[order]
        shares = np.cumsum(self.counts[ordered]) / self.tokens
        return {
            "counted_tokens": self.tokens,
            "different_ids": len(used),
            "unused_below_largest": ids - len(used),
            "ids_that_make_up_half": int(np.searchsorted(shares, 0.5)) + 1,
            "most_frequent": [
                {
                    "id": int(index),
                    "count": int(self.counts[index]),
                    "share": float(self.counts[index] / self.tokens),
                    "text": _text(tokenizer, [int(index)]),
                }
                for index in ordered[:MOST_FREQUENT]
            ],
        }


def _count_ids(corpus: Corpus, progress: ProgressCallback) -> _Counted:
    reader = corpus.reader
    counts = np.zeros(corpus.meta.max_id + 1, dtype=np.int64)
    chunks = -(-reader.num_tokens // CHUNK_TOKENS)
    chosen = _spread(chunks, max(1, COUNTED_TOKENS // CHUNK_TOKENS))
    counted = 0
    for number, chunk in enumerate(chosen, start=1):
        ids = reader.tokens[chunk * CHUNK_TOKENS : (chunk + 1) * CHUNK_TOKENS]
        counts += np.bincount(ids, minlength=len(counts))
        counted += len(ids)
        progress(Progress("counting ids", number, len(chosen), "blocks"))
    return _Counted(counts, counted)


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` of ``range(count)``, at equal distances, the first among them."""
    if count <= most:
        return list(range(count))
    return [number * count // most for number in range(most)]


def _by_powers_of_two(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Documents by length: ``"8": n`` says that n have 8 to 15 tokens."""
    powers = np.floor(np.log2(lengths)).astype(np.int64)
    return {str(2**power): int(count) for power, count in enumerate(np.bincount(powers)) if count}


def _split(lengths: NDArray[np.int64], weights: str) -> dict[str, dict[str, int]]:
    pieces = {
        "train": split_documents(lengths, weights, "train", 0),
        "validation": split_documents(lengths, weights, "validation", 0),
    }
    return {
        name: {"documents": len(found), "tokens": int(found.lengths.sum())} for name, found in pieces.items()
    }


def _sample(corpus: Corpus, document: int) -> dict[str, Any]:
    ids = corpus.reader.document(document)[:SAMPLE_TOKENS].tolist()
    return {"document": document, "token_ids": ids, "text": _text(corpus.tokenizer, ids)}


def _text(tokenizer: Tokenizer | None, ids: list[int]) -> str | None:
    return None if tokenizer is None else str(tokenizer.decode(ids, skip_special_tokens=False))


def _end_of_documents(corpus: Corpus, counted: _Counted, filled: NDArray[np.int64]) -> dict[str, Any]:
    eod_id = corpus.eod_id
    if eod_id is None:
        return {"eod_id": None, "eod_tokens": None, "documents_ending_with_eod": None}
    last = corpus.reader.tokens[corpus.reader.document_offsets[filled + 1] - 1]
    return {
        "eod_id": eod_id,
        "eod_tokens": int(counted.counts[eod_id]) if eod_id < len(counted.counts) else 0,
        "documents_ending_with_eod": float((last == eod_id).mean()),
    }
