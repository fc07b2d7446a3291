"""A block of text as token ids: the work of one process, or of each of several, of ``data prepare``."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from drivetrain.engine.data.duplicates import as_array, digest
from drivetrain.engine.data.indexed import LONGEST_DOCUMENT, dtype_for_vocabulary
from drivetrain.engine.data.sources.reading import texts_of
from drivetrain.engine.data.sources.source import Content, Fragment, Reading, Report
from drivetrain.engine.data.tokenizer import encode
from drivetrain.errors import DataError

__all__ = ["Encoded", "Encoder"]


@dataclass(frozen=True)
class Encoded:
    """The documents of a block.

    Attributes:
        tokens: (n,) ids of all of them, each document with its end, of the dtype that the corpus stores.
        lengths: (d,) int32 tokens of each.
        digests: (d, 2) uint64, see ``duplicates``.
        text_bytes: (d,) int64 UTF-8 bytes of each.
        report: what was left out.
        is_open: the one document is not at its end; the next block goes on with it.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    digests: NDArray[np.uint64]
    text_bytes: NDArray[np.int64]
    report: Report
    is_open: bool = False


@dataclass(frozen=True)
class Encoder:
    """Encodes blocks. Picklable: a process builds the tokenizer itself.

    Attributes:
        tokenizer_text: a tokenizer.json.
        vocab_size: every id is below it; it chooses the dtype.
        eod_id: the id that ends a document.
        reading: how sources are read.
    """

    tokenizer_text: str
    vocab_size: int
    eod_id: int
    reading: Reading

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(self.tokenizer_text)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the ids in the corpus."""
        return dtype_for_vocabulary(self.vocab_size)

    def encode(self, content: Content) -> Encoded:
        """The documents of a block that are not empty.

        Raises:
            DataError: see ``texts_of``; a document that is too long for the format.
        """
        report = Report()
        texts: list[str] = []
        digests: list[bytes] = []
        sizes: list[int] = []
        for text in texts_of(content, self.reading, report):
            if not text:
                report.skipped["empty documents"] += 1
                continue
            data = text.encode()
            texts.append(text)
            sizes.append(len(data))
            digests.append(digest(data))
        is_open = isinstance(content, Fragment) and not content.last
        if isinstance(content, Fragment):
            digests = [content.digest]
        end = np.array([] if is_open else [self.eod_id], dtype=self.dtype)
        ids = encode(self._tokenizer, texts, split_long=self.reading.split_long, dtype=self.dtype)
        lengths = [len(document) + len(end) for document in ids]
        if lengths and max(lengths) > LONGEST_DOCUMENT:
            raise DataError(f"a document has {max(lengths):,} tokens; the format holds {LONGEST_DOCUMENT:,}")
        return Encoded(
            np.concatenate([part for document in ids for part in (document, end)]) if ids else end[:0],
            np.array(lengths, dtype=np.int32),
            as_array(digests),
            np.array(sizes, dtype=np.int64),
            report,
            is_open,
        )
