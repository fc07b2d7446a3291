"""Megatron's indexed corpora: ``<prefix>.bin`` holds token ids, ``<prefix>.idx`` the documents.

The index, little-endian (Megatron-LM ``megatron/core/datasets/indexed_dataset.py``)::

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     code of the dtype of the ids (DTYPE_CODES)
    uint64    number of sequences, n
    uint64    number of entries in the document index, d
    int32[n]  tokens in each sequence
    int64[n]  byte at which each sequence starts in the .bin
    int64[d]  first sequence of each document, and n at the end

A file written here has one sequence a document. A reader refuses whatever does not add up to the byte.
"""

import os
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from drivetrain.archive.atomic import sync_folder
from drivetrain.engine.data.reader import TokenReader
from drivetrain.errors import DataError

__all__ = [
    "DTYPE_CODES",
    "LONGEST_DOCUMENT",
    "IndexedReader",
    "IndexedWriter",
    "dtype_for_vocabulary",
    "index_bytes",
    "index_path",
    "tokens_path",
]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Integer dtypes by their code. 6 and 7 are Megatron's floats, which are no token ids."""
FLOAT_CODES = {6: "float64", 7: "float32"}
LONGEST_DOCUMENT = 2**31 - 1
"""Tokens; the index keeps lengths as int32."""


def tokens_path(prefix: str | Path) -> Path:
    """The file of token ids of a corpus."""
    return Path(f"{prefix}.bin")


def index_path(prefix: str | Path) -> Path:
    """The index of a corpus."""
    return Path(f"{prefix}.idx")


def dtype_for_vocabulary(vocab_size: int) -> np.dtype[Any]:
    """The dtype in which ids below ``vocab_size`` are stored: uint16 when they fit, else int32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<i4")


def index_bytes(lengths: NDArray[np.int32], dtype: np.dtype[Any]) -> bytes:
    """The index of documents of these lengths, (n,) int32, one sequence each, whose ids are stored as ``dtype``."""
    code = next(code for code, name in DTYPE_CODES.items() if np.dtype(name) == dtype)
    count = len(lengths)
    pointers = np.zeros(count, dtype="<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= dtype.itemsize
    return b"".join(
        (
            HEADER.pack(MAGIC, VERSION, code, count, count + 1),
            lengths.astype("<i4").tobytes(),
            pointers.tobytes(),
            np.arange(count + 1, dtype="<i8").tobytes(),
        )
    )


class IndexedWriter:
    """Writes a corpus one document at a time; nothing appears under its name before ``commit``.

    Use as a context manager: leaving without ``commit`` removes the temporary files.

    Args:
        prefix: path without ``.bin`` or ``.idx``; its folder must exist.
        vocab_size: every id must be below it; also chooses the dtype.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self.dtype = dtype_for_vocabulary(vocab_size)
        self.num_tokens = 0
        self.max_id = -1
        self._lengths = array("i")
        suffix = f".tmp-{os.getpid()}"
        self._temporary_tokens = Path(f"{tokens_path(prefix)}{suffix}")
        self._temporary_index = Path(f"{index_path(prefix)}{suffix}")
        self._file: BinaryIO = self._temporary_tokens.open("wb")

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def add(self, token_ids: NDArray[Any] | list[int]) -> None:
        """Append one document. ``token_ids``: (length,) integers in ``[0, vocab_size)``."""
        ids = np.asarray(token_ids, dtype=np.int64)
        assert ids.ndim == 1
        self._require_fitting(ids, len(ids))
        self._file.write(ids.astype(self.dtype).tobytes())
        self._lengths.append(len(ids))
        self.num_tokens += len(ids)

    def add_all(self, token_ids: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Append several documents at once. ``token_ids``: their ids, as :meth:`add` takes them, one behind the other;
        ``lengths``: (n,) tokens of each."""
        assert int(lengths.sum()) == len(token_ids)
        self._require_fitting(token_ids, int(lengths.max(initial=0)))
        self._file.write(token_ids.astype(self.dtype).tobytes())
        self._lengths.extend(lengths.tolist())
        self.num_tokens += len(token_ids)

    def _require_fitting(self, ids: NDArray[Any], longest: int) -> None:
        if longest > LONGEST_DOCUMENT:
            raise DataError(
                f"document {self.num_documents} has {longest:,} tokens; the format holds {LONGEST_DOCUMENT:,}"
            )
        if not len(ids):
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise DataError(
                f"document {self.num_documents} holds token id {low if low < 0 else high}, "
                f"outside the vocabulary of {self.vocab_size}"
            )
        self.max_id = max(self.max_id, high)

    def seal(self) -> tuple[Path, Path]:
        """Finish both files under their temporary names, which are returned: .bin, .idx."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            with self._temporary_index.open("wb") as file:
                file.write(self._index())
                file.flush()
                os.fsync(file.fileno())
        return self._temporary_tokens, self._temporary_index

    def commit(self) -> None:
        """Make both files appear. Killed at any point, a reader finds the old corpus, none or the new one."""
        self.seal()
        # An old index beside new tokens could fit by chance, so it goes first; the new one comes last.
        index_path(self.prefix).unlink(missing_ok=True)
        self._temporary_tokens.replace(tokens_path(self.prefix))
        self._temporary_index.replace(index_path(self.prefix))
        sync_folder(self.prefix.parent)

    def _index(self) -> bytes:
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32)
        return index_bytes(lengths, self.dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temporary_tokens.unlink(missing_ok=True)
        self._temporary_index.unlink(missing_ok=True)


class IndexedReader(TokenReader):
    """A corpus of ``.bin`` and ``.idx``.

    Raises:
        DataError: a file is missing, no index, damaged, truncated or longer than the index says.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.format = "Megatron indexed, version 1"
        self.files = {"bin": tokens_path(prefix), "idx": index_path(prefix)}
        path = index_path(prefix)
        _require(prefix)
        size = path.stat().st_size
        code, num_sequences, num_entries = _read_header(path, size)
        self.dtype = np.dtype(DTYPE_CODES[code]).newbyteorder("<")
        with _readable(path):
            raw = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        at = HEADER.size
        lengths = raw[at : at + 4 * num_sequences].view("<i4")
        at += 4 * num_sequences
        pointers = raw[at : at + 8 * num_sequences].view("<i8")
        at += 8 * num_sequences
        documents = raw[at : at + 8 * num_entries].view("<i8")
        offsets = _sequence_offsets(path, lengths, pointers, self.dtype.itemsize)
        _check_documents(path, documents, num_sequences)
        self.num_sequences = num_sequences
        self.document_offsets = offsets[documents]
        self.num_tokens = int(offsets[-1])
        self.tokens = self._map_tokens()

    def _map_tokens(self) -> NDArray[Any]:
        path = tokens_path(self.prefix)
        expected, found = self.num_tokens * self.dtype.itemsize, path.stat().st_size
        if expected != found:
            raise DataError(_size_message(path, expected, found))
        if not self.num_tokens:
            return np.zeros(0, self.dtype)
        with _readable(path):
            return np.memmap(path, dtype=self.dtype, mode="r").view(np.ndarray)

    def __reduce__(self) -> tuple[type["IndexedReader"], tuple[str]]:
        # A worker process maps the files itself instead of receiving a copy of the corpus.
        return (IndexedReader, (self.prefix,))


def _require(prefix: str | Path) -> None:
    for suffix in (".bin", ".idx"):
        if str(prefix).endswith(suffix) and index_path(str(prefix).removesuffix(suffix)).exists():
            raise DataError(
                f"{str(prefix)!r}: a corpus is named by its prefix; use {str(prefix).removesuffix(suffix)!r}"
            )
    tokens, index = tokens_path(prefix), index_path(prefix)
    if index.is_file() and tokens.is_file():
        return
    if tokens.is_file():
        raise DataError(
            f"{index} is missing beside {tokens.name}: an indexed corpus has both "
            f"(a file of token ids of nanoGPT or llm.c has none, and is named by itself: {tokens})"
        )
    missing = tokens if index.is_file() else index
    try:
        others = sorted(str(path)[: -len(".idx")] for path in Path(prefix).parent.glob("*.idx"))
    except OSError:
        others = []
    hint = f"; corpora there: {', '.join(others[:5])}" if others and not index.is_file() else ""
    raise DataError(f"no corpus at {str(prefix)!r}: {missing} does not exist{hint}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _size_message(path: Path, expected: int, found: int) -> str:
    state = "truncated" if found < expected else "longer than its index says"
    return f"{path} is {state}: expected {expected:,} bytes, found {found:,}"


def _read_header(path: Path, size: int) -> tuple[int, int, int]:
    """Dtype code, number of sequences and of document-index entries; checks the size of the file."""
    with _readable(path), path.open("rb") as file:
        head = file.read(HEADER.size)
    if not MAGIC.startswith(head[: len(MAGIC)]):
        raise DataError(f"{path} is no Megatron index: it starts with {head[:9]!r} instead of {MAGIC!r}")
    if len(head) < HEADER.size:
        raise DataError(f"{path} is truncated: expected at least {HEADER.size} bytes, found {size:,}")
    _, version, code, num_sequences, num_entries = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path} has version {version} of the index format; version {VERSION} is readable")
    if code in FLOAT_CODES:
        raise DataError(f"{path} holds {FLOAT_CODES[code]} values, which are no token ids")
    if code not in DTYPE_CODES:
        raise DataError(f"{path} has dtype code {code}; known codes are {', '.join(map(str, DTYPE_CODES))}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    if size == expected + num_sequences and num_sequences:
        raise DataError(
            f"{path} is a multimodal index (a mode byte for each sequence), which is not supported"
        )
    if size != expected:
        raise DataError(_size_message(path, expected, size))
    return code, num_sequences, num_entries


def _sequence_offsets(
    path: Path, lengths: NDArray[np.int32], pointers: NDArray[np.int64], itemsize: int
) -> NDArray[np.int64]:
    """(num_sequences + 1,) int64 tokens before each sequence, from lengths that the pointers agree with."""
    if len(lengths) and int(lengths.min()) < 0:
        at = int(np.argmax(lengths < 0))
        raise DataError(f"{path} is damaged: sequence {at} has length {int(lengths[at])}")
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    wrong = pointers != offsets[:-1] * itemsize
    if wrong.any():
        at = int(np.argmax(wrong))
        raise DataError(
            f"{path} is damaged: sequence {at} starts at byte {int(pointers[at]):,}, "
            f"but the lengths before it add up to {int(offsets[at]) * itemsize:,}"
        )
    return offsets


def _check_documents(path: Path, documents: NDArray[np.int64], num_sequences: int) -> None:
    if (
        len(documents) == 0
        or int(documents[0]) != 0
        or int(documents[-1]) != num_sequences
        or bool((documents[1:] < documents[:-1]).any())
    ):
        raise DataError(
            f"{path} is damaged: its document index must rise from 0 to {num_sequences}, "
            "the number of sequences"
        )
