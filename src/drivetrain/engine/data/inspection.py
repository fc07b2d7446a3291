"""What a corpus holds, for a person or a program to look at before training on it."""

from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.progress import Progress, ProgressCallback, silent

__all__ = ["inspect_corpus"]

SAMPLE_TOKENS = 80
CHUNK_TOKENS = 1 << 24


def inspect_corpus(
    prefix: str | Path, tokenizer_path: str | Path | None = None, progress: ProgressCallback = silent
) -> dict[str, Any]:
    """Facts of a corpus as one JSON-able document; unknown ones are None. Raises DataError for a damaged one.

    ``document_length`` is in tokens; ``eod_tokens`` counts the end-of-document id anywhere, and
    ``documents_ending_with_eod`` is the share of documents whose last token it is.
    """
    corpus = Corpus.open(prefix, tokenizer_path, progress=progress)
    reader, meta = corpus.reader, corpus.meta
    lengths = reader.lengths()
    lengths = lengths[lengths > 0]
    first = int(np.argmax(reader.lengths() > 0))
    head = reader.document(first)[:SAMPLE_TOKENS]
    byte_lengths = corpus.token_byte_lengths()
    return {
        "schema": 1,
        "prefix": corpus.prefix,
        "format": "Megatron indexed, version 1",
        "dtype": reader.dtype.name,
        "documents": reader.num_documents,
        "empty_documents": reader.num_documents - len(lengths),
        "sequences": reader.num_sequences,
        "tokens": reader.num_tokens,
        "document_length": {
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "max": int(lengths.max()),
        },
        "max_id": meta.max_id,
        "smallest_vocab_size": meta.max_id + 1,
        **_end_of_documents(corpus, progress),
        "text_bytes": meta.text_bytes,
        "bytes_per_token": meta.text_bytes / reader.num_tokens if meta.text_bytes is not None else None,
        "bits_per_byte_available": byte_lengths.values is not None,
        "bits_per_byte_reason": byte_lengths.reason or None,
        "tokenizer": str(corpus.tokenizer_file) if corpus.tokenizer_file is not None else None,
        "tokenizer_vocab_size": meta.vocab_size,
        "origin": meta.origin,
        "sources": list(meta.sources),
        "skipped": meta.skipped,
        "fingerprint": corpus.fingerprint,
        "first_sample": {
            "token_ids": head.tolist(),
            "text": (
                corpus.tokenizer.decode(head.tolist(), skip_special_tokens=False)
                if corpus.tokenizer is not None
                else None
            ),
        },
    }


def _end_of_documents(corpus: Corpus, progress: ProgressCallback) -> dict[str, Any]:
    if corpus.eod_id is None:
        return {"eod_id": None, "eod_tokens": None, "documents_ending_with_eod": None}
    reader = corpus.reader
    count = 0
    for start in range(0, reader.num_tokens, CHUNK_TOKENS):
        chunk = reader.tokens[start : start + CHUNK_TOKENS]
        count += int((chunk == corpus.eod_id).sum())
        progress(Progress("counting ends of documents", start + len(chunk), reader.num_tokens, "tokens"))
    filled = np.flatnonzero(reader.lengths() > 0)
    last = reader.tokens[reader.document_offsets[filled + 1] - 1]
    return {
        "eod_id": corpus.eod_id,
        "eod_tokens": count,
        "documents_ending_with_eod": float((last == corpus.eod_id).mean()),
    }
