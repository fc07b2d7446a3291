"""All arguments of some records, read from the file again: shapes, launch dimensions, call stacks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.kineto.salvage import arguments_of, salvage
from drivetrain.trace.kineto.scanning import split_objects
from drivetrain.trace.kineto.source import Source

__all__ = ["Arguments"]


class _Argued(msgspec.Struct, gc=False):
    args: Any = None


@dataclass(frozen=True, eq=False)
class Arguments:
    """Reads arguments by ordinal of the record in the file. Holds where each piece of the file begins."""

    path: Path
    first: NDArray[np.int64]
    """Ordinal of the first record of each piece, shape (pieces,), ascending."""
    offset: NDArray[np.int64]
    """Where its text begins in the uncompressed file."""
    length: NDArray[np.int64]
    """Length of its text."""

    def __call__(self, file_indices: NDArray[np.int64]) -> list[dict[str, Any]]:
        """One dictionary for each index, in their order; empty for a record without arguments.

        Raises:
            DataError: the file has gone.
        """
        answers: list[dict[str, Any]] = [{} for _ in file_indices]
        owners = np.searchsorted(self.first, file_indices, side="right") - 1
        wanted: dict[int, list[int]] = {}
        for row, owner in enumerate(owners):
            wanted.setdefault(int(owner), []).append(row)
        for piece, text in self._texts(sorted(wanted)):
            ordinals = [int(file_indices[row]) - int(self.first[piece]) for row in wanted[piece]]
            for row, arguments in zip(wanted[piece], _arguments_at(text, ordinals), strict=True):
                answers[row] = arguments
        return answers

    def _texts(self, pieces: Sequence[int]) -> list[tuple[int, bytes]] | Any:
        blocks = Source(self.path).blocks()
        text, offset = b"", 0
        for piece in pieces:
            begin, end = int(self.offset[piece]), int(self.offset[piece] + self.length[piece])
            while offset + len(text) < end:
                block = next(blocks, b"")
                if not block:
                    break
                skipped = max(0, min(begin - offset, len(text)))
                text, offset = text[skipped:] + block, offset + skipped
            yield piece, text[begin - offset : end - offset]


def _arguments_at(text: bytes, ordinals: Sequence[int]) -> list[dict[str, Any]]:
    try:
        decoded = msgspec.json.decode(b"[" + text + b"]", type=list[_Argued])
    except (msgspec.DecodeError, UnicodeDecodeError):
        spans = _spans(text)
        return [arguments_of(text[slice(*spans[one])]) if one < len(spans) else {} for one in ordinals]
    return [
        decoded[one].args if one < len(decoded) and isinstance(decoded[one].args, dict) else {}
        for one in ordinals
    ]


def _spans(text: bytes) -> list[tuple[int, int]]:
    """Where the records of a piece are, as the reading counted them."""
    try:
        count = len(msgspec.json.decode(b"[" + text + b"]", type=list[msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return salvage(text, Counter()).spans
    spans = split_objects(text)
    return spans if len(spans) == count else salvage(text, Counter()).spans
