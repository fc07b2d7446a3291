"""Text to an indexed corpus with its tokenizer and its facts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from drivetrain.archive.atomic import write_fault, write_text
from drivetrain.engine.data.documents import Document, Source, discover, read_documents
from drivetrain.engine.data.indexed import IndexedWriter, index_path
from drivetrain.engine.data.meta import CorpusMeta, fingerprints, write_meta
from drivetrain.engine.data.order import hash64
from drivetrain.engine.data.progress import Progress, ProgressCallback, silent
from drivetrain.engine.data.tokenizer import (
    encode,
    end_of_document_id,
    load_tokenizer,
    token_byte_lengths,
    tokenizer_hash,
    train_tokenizer,
    vocabulary_size,
)
from drivetrain.errors import DataError

__all__ = ["DEFAULT_VOCABULARY", "prepare", "prepare_sources", "tokenizer_path_of"]

DEFAULT_VOCABULARY = 8192
"""Ids of a tokenizer that is trained when neither a size nor a file was given."""
TOKENIZER_TEXT_BYTES = 200_000_000
"""A tokenizer learns from about this much text; larger inputs are sampled by document."""
BATCH_CHARACTERS = 1 << 22
SAMPLING_KEY = 0x746F6B656E


def tokenizer_path_of(prefix: str | Path) -> Path:
    """Where the tokenizer of a prepared corpus is kept."""
    return Path(f"{prefix}.tokenizer.json")


def prepare(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    *,
    vocab_size: int | None = None,
    tokenizer_path: str | Path | None = None,
    json_key: str = "text",
    eod_token: str | None = None,
    progress: ProgressCallback = silent,
) -> CorpusMeta:
    """Write ``<output_prefix>.bin``, ``.idx``, ``.meta.json`` and ``.tokenizer.json``.

    The same inputs give the same bytes. Nothing appears under the final names before all is encoded.

    Args:
        inputs: text files (one document each), folders, JSON lines, Parquet.
        output_prefix: path without suffix; its folder is made.
        vocab_size: train byte-level BPE of this many ids on the inputs; DEFAULT_VOCABULARY when neither
            this nor ``tokenizer_path`` is given.
        tokenizer_path: a tokenizer.json to use instead.
        json_key: key of the text in JSON lines, and its column in Parquet.
        eod_token: token that ends each document; by default the first usual name the tokenizer has.
        progress: called as the work proceeds.
    Raises:
        DataError: inputs missing, damaged or empty; tokenizer missing or unusable.
        EnvironmentFault: no room on the disk, or no pyarrow for Parquet.
    """
    if vocab_size is not None and tokenizer_path is not None:
        raise DataError("give a vocabulary size to train a tokenizer, or a tokenizer file, not both")
    given = load_tokenizer(tokenizer_path) if tokenizer_path is not None else None
    sources, skipped = discover(inputs)
    return prepare_sources(
        sources,
        output_prefix,
        tokenizer=given,
        vocab_size=DEFAULT_VOCABULARY if vocab_size is None and given is None else vocab_size,
        json_key=json_key,
        eod_token=eod_token,
        described_as=tuple(map(str, inputs)),
        skipped=skipped,
        progress=progress,
    )


def prepare_sources(
    sources: Sequence[Source],
    output_prefix: str | Path,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int | None,
    json_key: str = "text",
    eod_token: str | None = None,
    described_as: tuple[str, ...],
    skipped: Counter[str],
    progress: ProgressCallback = silent,
) -> CorpusMeta:
    """``prepare`` for files already found; trains a tokenizer of ``vocab_size`` when given none."""
    if str(output_prefix).endswith(("/", "\\")) or Path(output_prefix).name in ("", ".", ".."):
        raise DataError(f"the output {str(output_prefix)!r} is a folder; add a name, as in corpora/mine")
    for suffix in (".bin", ".idx"):
        if str(output_prefix).endswith(suffix):
            right = str(output_prefix).removesuffix(suffix)
            raise DataError(f"the output is a prefix: {right!r}, not {str(output_prefix)!r}")
    share: float | None = None
    if tokenizer is None:
        assert vocab_size is not None
        tokenizer, share = _train(sources, vocab_size, json_key, progress)
    eod_id = end_of_document_id(tokenizer, eod_token)
    if eod_id is None:
        raise DataError(
            "the tokenizer has no end-of-document token under a usual name; name one (--eod-token)"
        )
    with _disk(output_prefix):
        Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
        with IndexedWriter(output_prefix, vocabulary_size(tokenizer)) as writer:
            text_bytes = _encode_all(sources, tokenizer, eod_id, writer, json_key, skipped, progress)
            meta = CorpusMeta(
                origin="prepared",
                documents=writer.num_documents,
                tokens=writer.num_tokens,
                max_id=writer.max_id,
                files=fingerprints(*writer.seal()),
                vocab_size=vocabulary_size(tokenizer),
                vocab_size_requested=vocab_size,
                tokenizer_sha256=tokenizer_hash(tokenizer),
                eod_id=eod_id,
                text_bytes=text_bytes,
                sources=described_as,
                skipped=dict(sorted(skipped.items())),
                tokenizer_text_share=share,
            )
            # The old index goes first and the new one comes last, so that the facts never belong to others.
            index_path(output_prefix).unlink(missing_ok=True)
            write_text(tokenizer_path_of(output_prefix), tokenizer.to_str(pretty=True))
            write_meta(output_prefix, meta)
            writer.commit()
    return meta


def _train(
    sources: Sequence[Source], vocab_size: int, json_key: str, progress: ProgressCallback
) -> tuple[Tokenizer, float]:
    total = sum(source.size for source in sources)
    share = min(1.0, TOKENIZER_TEXT_BYTES / max(total, 1))
    threshold = np.uint64(min(2**64 - 1, int(share * 2**64)))
    seen = 0

    def texts() -> Iterator[str]:
        nonlocal seen
        consumed = 0
        for number, document in enumerate(read_documents(sources, json_key, Counter())):
            consumed += document.consumed
            progress(Progress("learning the tokenizer", consumed, total, "bytes"))
            if (
                share == 1.0
                or number == 0
                or hash64(np.array([number], np.uint64), SAMPLING_KEY)[0] < threshold
            ):
                seen += 1
                yield document.text

    tokenizer = train_tokenizer(texts(), vocab_size)
    if not seen:
        raise DataError(_empty(sources))
    return tokenizer, share


def _empty(sources: Sequence[Source]) -> str:
    names = ", ".join(str(source.path) for source in sources[:3])
    return f"the corpus is empty: no text in {len(sources)} file(s){f' ({names})' if names else ''}"


def _encode_all(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    eod_id: int,
    writer: IndexedWriter,
    json_key: str,
    skipped: Counter[str],
    progress: ProgressCallback,
) -> int:
    """Encode every document into ``writer``; the bytes of their text."""
    total = sum(source.size for source in sources)
    split_long = token_byte_lengths(tokenizer).values is not None
    text_bytes = consumed = 0
    progress(Progress("encoding", 0, total, "bytes"))
    for batch in _batches(read_documents(sources, json_key, skipped)):
        texts = [document.text for document in batch]
        for ids in encode(tokenizer, texts, split_long=split_long):
            writer.add(np.append(ids, eod_id))
        text_bytes += sum(len(text.encode()) for text in texts)
        consumed += sum(document.consumed for document in batch)
        progress(Progress("encoding", consumed, total, "bytes"))
    if not writer.num_documents:
        raise DataError(_empty(sources))
    return text_bytes


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@contextmanager
def _disk(prefix: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise write_fault(Path(f"{prefix}.bin"), error, "no corpus was written") from error
