"""Files of bare token ids: nanoGPT's (uint16, nothing else) and llm.c's (a header, then uint16 or uint32)."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.archive.atomic import write_bytes
from drivetrain.engine.data.formats.detect import HEADER_BYTES, first_bytes, foreign_format, llm_c_header
from drivetrain.engine.data.progress import Progress, ProgressCallback
from drivetrain.engine.data.reader import TokenReader
from drivetrain.errors import DataError, EnvironmentFault
from drivetrain.measure.machine import cache_folder

__all__ = ["RawReader"]

SCAN_TOKENS = 1 << 24
END_OF_TEXT = 50256
"""The last id of GPT-2's vocabulary. A file whose largest id it is was made with that, and has it between documents."""


class RawReader(TokenReader):
    """A file of bare token ids, which holds no borders: one document, until :meth:`with_documents` has found them.

    Args:
        path: the file.
        borders: a file of the tokens at which documents start, as ``with_documents`` wrote it; or the (n + 1,) int64
            themselves.
    Attributes:
        implied_eod: the id between documents by the rule of the format; None where it has none.
    Raises:
        DataError: empty, truncated, longer than its header says, or a file of another kind.
    """

    def __init__(self, path: str | Path, borders: str | NDArray[np.int64] | None = None) -> None:
        self.prefix = str(path)
        self.files = {"bin": Path(path)}
        self.num_sequences = 1
        self.implied_eod: int | None = None
        self._borders = borders
        file = Path(path)
        head = first_bytes(file)
        size = file.stat().st_size
        header = llm_c_header(file, head)
        if header is not None:
            self.format = "llm.c, " + header.dtype.name
            self.dtype, start, self.implied_eod = header.dtype, HEADER_BYTES, header.eod_id
            expected = HEADER_BYTES + header.num_tokens * header.dtype.itemsize
            if size != expected:
                state = "truncated" if size < expected else "longer than its header says"
                raise DataError(f"{file} is {state}: expected {expected:,} bytes, found {size:,}")
        else:
            other = foreign_format(head)
            if other is not None:
                raise DataError(f"{file} is {other}, and no file of token ids")
            if size % 2:
                raise DataError(
                    f"{file} has {size:,} bytes: token ids as nanoGPT writes them are uint16, an even number of bytes"
                )
            self.format = "nanoGPT, uint16"
            self.dtype, start = np.dtype("<u2"), 0
        if size == start:
            raise DataError(f"{file} is empty: it holds no token ids")
        try:
            self.tokens = np.memmap(file, dtype=self.dtype, mode="r", offset=start).view(np.ndarray)
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
        self.num_tokens = len(self.tokens)
        self.document_offsets = self._offsets()

    def _offsets(self) -> NDArray[np.int64]:
        if self._borders is None:
            return np.array([0, self.num_tokens], dtype=np.int64)
        if isinstance(self._borders, str):
            offsets: NDArray[np.int64] = np.load(self._borders, mmap_mode="r", allow_pickle=False).view(
                np.ndarray
            )
            return offsets
        return self._borders

    def eod_by_rule(self, max_id: int) -> int | None:
        """The id between documents, by the format or by the vocabulary that the largest id gives away."""
        if self.implied_eod is not None and max_id >= self.implied_eod:
            return self.implied_eod
        return END_OF_TEXT if max_id == END_OF_TEXT else None

    def with_documents(self, eod_id: int, fingerprint: str, progress: ProgressCallback) -> "RawReader":
        """The same tokens with the borders of documents: behind each ``eod_id``.

        They are searched for once, and kept in the cache folder under the ``fingerprint`` of the file.
        """
        key = hashlib.sha256(f"{fingerprint} {eod_id}".encode()).hexdigest()[:32]
        path = cache_folder() / "borders" / f"{key}.npy"
        if not path.is_file():
            borders = self._find(eod_id, progress)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(path, _as_npy(borders))
            except (OSError, EnvironmentFault) as error:
                progress(Progress(f"the search for borders of documents will be repeated next time: {error}"))
                return RawReader(self.prefix, borders)
        return RawReader(self.prefix, str(path))

    def _find(self, eod_id: int, progress: ProgressCallback) -> NDArray[np.int64]:
        found: list[NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
        for start in range(0, self.num_tokens, SCAN_TOKENS):
            chunk = self.tokens[start : start + SCAN_TOKENS]
            found.append(np.flatnonzero(chunk == eod_id).astype(np.int64) + start + 1)
            progress(
                Progress("searching borders of documents", start + len(chunk), self.num_tokens, "tokens")
            )
        borders = np.concatenate(found)
        return borders if borders[-1] == self.num_tokens else np.append(borders, self.num_tokens)

    def __reduce__(self) -> tuple[type["RawReader"], tuple[Any, ...]]:
        return (RawReader, (self.prefix, self._borders))


def _as_npy(values: NDArray[np.int64]) -> bytes:
    import io

    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()
