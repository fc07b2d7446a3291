"""Documents of token ids, whatever file they lie in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["TokenReader"]


class TokenReader:
    """A corpus, memory-mapped and checked on opening. Picklable: a process maps the files itself.

    Attributes:
        prefix: path of the corpus; facts and tokenizer are kept beside it under this name.
        format: of its files, in words.
        files: its files by what they hold: ``bin`` the token ids, ``idx`` an index.
        dtype: of the stored ids.
        tokens: (num_tokens,) all ids in the order of the file, of the stored dtype, read-only.
        num_tokens, num_sequences: how many.
        document_offsets: (num_documents + 1,) int64, the token at which each document starts.
    """

    prefix: str
    format: str
    files: dict[str, Path]
    dtype: np.dtype[Any]
    tokens: NDArray[Any]
    num_tokens: int
    num_sequences: int
    document_offsets: NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        """Documents in the corpus, empty ones included."""
        return len(self.document_offsets) - 1

    def lengths(self) -> NDArray[np.int64]:
        """(num_documents,) tokens in each document."""
        return np.diff(self.document_offsets)

    def document(self, index: int) -> NDArray[Any]:
        """(length,) token ids of one document: a read-only view of the file."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        return self.tokens[self.document_offsets[index] : self.document_offsets[index + 1]]

    def __len__(self) -> int:
        return self.num_documents

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self.document(index) for index in range(self.num_documents))
