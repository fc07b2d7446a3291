"""A corpus that a run reads: tokens, tokenizer, identity; checked against the model before the first step."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from drivetrain.config import DataConfig, ModelConfig
from drivetrain.engine.data.fingerprint import combined_fingerprint, file_fingerprint
from drivetrain.engine.data.formats.opening import open_tokens
from drivetrain.engine.data.formats.raw import RawReader
from drivetrain.engine.data.meta import CorpusMeta, meta_path, read_meta, write_meta
from drivetrain.engine.data.prepare import tokenizer_path_of
from drivetrain.engine.data.progress import Progress, ProgressCallback, silent
from drivetrain.engine.data.reader import TokenReader
from drivetrain.engine.data.tokenizer import (
    TokenByteLengths,
    end_of_document_id,
    load_tokenizer,
    token_byte_lengths,
    tokenizer_hash,
)
from drivetrain.errors import DataError, EnvironmentFault

if TYPE_CHECKING:
    import torch

__all__ = ["Corpus", "ensure_corpus"]

SCAN_TOKENS = 1 << 24


@dataclass(frozen=True, eq=False)
class Corpus:
    """An opened corpus.

    Attributes:
        prefix: its path: without suffix, or as a foreign file is named.
        reader: documents and tokens.
        meta: its facts.
        tokenizer: None where the corpus has none; then text cannot be generated or measured in bytes.
        tokenizer_file: where the tokenizer came from.
        fingerprint: hex SHA-256 of both files (see ``fingerprint``) and the tokenizer.
        eod_id: the id that ends a document; None where it is not known (document borders always are).
        vocab_size: rows of the model's embedding, which every id is below.
    """

    prefix: str
    reader: TokenReader
    meta: CorpusMeta
    tokenizer: Tokenizer | None
    tokenizer_file: Path | None
    fingerprint: str
    eod_id: int | None
    vocab_size: int

    @classmethod
    def open(
        cls,
        prefix: str | Path,
        tokenizer_path: str | Path | None = None,
        *,
        vocab_size: int | None = None,
        progress: ProgressCallback = silent,
    ) -> "Corpus":
        """Open and check a corpus.

        Args:
            prefix: path without ``.bin`` or ``.idx``; or a file of another tool, see ``formats``.
            tokenizer_path: a tokenizer.json; by default ``<prefix>.tokenizer.json``, else
                ``tokenizer.json`` in the same folder, where there is one.
            vocab_size: rows of the model's embedding; by default just enough for the corpus.
            progress: called while ids are scanned, which happens once for a corpus of another tool.
        Raises:
            DataError: damaged or empty files, a missing or wrong tokenizer, an id outside the vocabulary.
        """
        reader = open_tokens(prefix, progress)
        if reader.num_tokens == 0:
            raise DataError(f"the corpus {str(prefix)!r} is empty: it has no tokens")
        meta = _facts(reader, vocab_size, progress)
        if vocab_size is not None and meta.max_id >= vocab_size:
            raise _id_outside(reader, meta.max_id, vocab_size)
        path = _tokenizer_path(prefix, tokenizer_path, meta)
        tokenizer = load_tokenizer(path) if path is not None else None
        tokenizer_sha256 = tokenizer_hash(tokenizer) if tokenizer is not None else None
        if meta.tokenizer_sha256 is not None and tokenizer_sha256 != meta.tokenizer_sha256:
            raise DataError(
                f"{path} is not the tokenizer that {str(prefix)!r} was prepared with "
                f"(SHA-256 {tokenizer_sha256}, expected {meta.tokenizer_sha256})"
            )
        eod_id = meta.eod_id
        if eod_id is None and tokenizer is not None:
            eod_id = end_of_document_id(tokenizer)
        if isinstance(reader, RawReader):
            eod_id = eod_id if eod_id is not None else reader.eod_by_rule(meta.max_id)
            reader = _with_borders(reader, eod_id, meta.files["bin"], progress)
        return cls(
            prefix=str(prefix),
            reader=reader,
            meta=meta,
            tokenizer=tokenizer,
            tokenizer_file=path,
            fingerprint=combined_fingerprint(
                meta.files["bin"], meta.files.get("idx", ""), tokenizer_sha256 or ""
            ),
            eod_id=eod_id,
            vocab_size=vocab_size if vocab_size is not None else meta.max_id + 1,
        )

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises DataError where the corpus has none."""
        if self.tokenizer is None:
            raise DataError(
                f"the corpus {self.prefix!r} has no tokenizer: give data.tokenizer_path, "
                f"or put it at {tokenizer_path_of(self.prefix)}"
            )
        return self.tokenizer

    def token_byte_lengths(self) -> TokenByteLengths:
        """Bytes of text of each id, (vocab_size,) int32, or the reason why they are not known."""
        if self.tokenizer is None:
            return TokenByteLengths(None, "bytes per token are not known: the corpus has no tokenizer")
        lengths = token_byte_lengths(self.tokenizer)
        if lengths.values is None:
            return lengths
        if self.meta.max_id >= len(lengths.values):
            return TokenByteLengths(
                None,
                f"bytes per token are not known: the corpus holds id {self.meta.max_id}, "
                f"the tokenizer has {len(lengths.values)} ids",
            )
        values: NDArray[np.int32] = np.zeros(max(self.vocab_size, len(lengths.values)), dtype=np.int32)
        values[: len(lengths.values)] = lengths.values
        return TokenByteLengths(values)

    def bytes_per_token(self) -> "torch.Tensor | None":
        """``token_byte_lengths`` as (vocab_size,) int64 on the CPU; None where they are not known."""
        import torch

        values = self.token_byte_lengths().values
        return None if values is None else torch.from_numpy(values.astype(np.int64))


def ensure_corpus(data: DataConfig, model: ModelConfig, progress: ProgressCallback = silent) -> Corpus:
    """The corpus of a configuration, or a blend of several; by default the standard library's, prepared if need be."""
    # What opens a blend needs this module.
    from drivetrain.engine.data.opening import open_data

    return open_data(data, model, progress)


def _facts(reader: TokenReader, vocab_size: int | None, progress: ProgressCallback) -> CorpusMeta:
    """The stored facts if they describe these very files; for another tool's corpus they are made."""
    prefix = reader.prefix
    files = {kind: file_fingerprint(path) for kind, path in reader.files.items()}
    stored = read_meta(prefix)
    if stored is not None and stored.files == files:
        return stored
    max_id = _scan(reader, progress)
    if stored is not None and stored.origin == "prepared":
        if vocab_size is not None and max_id >= vocab_size:
            raise _id_outside(reader, max_id, vocab_size)
        changed = " and ".join(
            str(path) for kind, path in reader.files.items() if files[kind] != stored.files.get(kind)
        )
        raise DataError(
            f"{changed} is not what {meta_path(prefix)} describes: prepare the corpus again, "
            "or delete that file if the change was meant"
        )
    meta = CorpusMeta(
        origin="scanned", documents=reader.num_documents, tokens=reader.num_tokens, max_id=max_id, files=files
    )
    try:
        write_meta(prefix, meta)
    except EnvironmentFault as error:
        progress(Progress(f"the scan of the token ids will be repeated next time: {error}"))
    return meta


def _with_borders(
    reader: RawReader, eod_id: int | None, fingerprint: str, progress: ProgressCallback
) -> RawReader:
    if eod_id is None:
        progress(
            Progress(
                f"{reader.prefix}: no id is known that ends a document, so that all of it is one document; "
                "data.tokenizer_path tells"
            )
        )
        return reader
    return reader.with_documents(eod_id, fingerprint, progress)


def _scan(reader: TokenReader, progress: ProgressCallback) -> int:
    """Largest id. Raises DataError at a negative one."""
    largest = -1
    for start in range(0, reader.num_tokens, SCAN_TOKENS):
        chunk = reader.tokens[start : start + SCAN_TOKENS]
        if int(chunk.min()) < 0:
            at = int(np.argmax(chunk < 0))
            raise DataError(
                f"{reader.files['bin']} holds the negative token id {int(chunk[at])} at {start + at:,}"
            )
        largest = max(largest, int(chunk.max()))
        progress(Progress("scanning token ids", start + len(chunk), reader.num_tokens, "tokens"))
    return largest


def _id_outside(reader: TokenReader, max_id: int, vocab_size: int) -> DataError:
    position = _first_at_least(reader.tokens, vocab_size)
    document = int(np.searchsorted(reader.document_offsets, position, side="right")) - 1
    return DataError(
        f"{reader.files['bin']} holds token id {int(reader.tokens[position])} at position {position:,} "
        f"(document {document}), outside model.vocab_size = {vocab_size}; "
        f"the smallest vocab_size for this corpus is {max_id + 1}"
    )


def _first_at_least(tokens: NDArray[Any], bound: int) -> int:
    for start in range(0, len(tokens), SCAN_TOKENS):
        outside = tokens[start : start + SCAN_TOKENS] >= bound
        if outside.any():
            return start + int(np.argmax(outside))
    raise AssertionError("the stored largest id does not occur in the corpus")


def _tokenizer_path(prefix: str | Path, given: str | Path | None, meta: CorpusMeta) -> Path | None:
    if given is not None:
        return Path(given)
    candidates = (tokenizer_path_of(prefix), Path(prefix).parent / "tokenizer.json")
    found = next((path for path in candidates if path.is_file()), None)
    if found is None and meta.tokenizer_sha256 is not None:
        raise DataError(
            f"the corpus {str(prefix)!r} was prepared with a tokenizer that is missing: "
            f"put it back at {candidates[0]}, or give data.tokenizer_path"
        )
    return found
