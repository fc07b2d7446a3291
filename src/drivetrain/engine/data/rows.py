"""What each row of a split holds: parts of one long stream, or whole pieces of documents beside each other."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from drivetrain.config import DataConfig
from drivetrain.engine.data.packing import best_fit, cut_to_length, one_a_row
from drivetrain.engine.data.split import Pieces

__all__ = ["Parts", "Rows", "rows_of"]


@dataclass(frozen=True)
class Parts:
    """The documents of some rows of ``seq_length + 1`` tokens, row by row, in order, without gaps; what is left of a
    row is padding.

    Attributes:
        rows: (n,) int64 which of the rows that were asked for, from 0 on; none of them is missing.
        documents: (n,) int64 indices into the corpus.
        skips: (n,) int64 tokens of the document before the part.
        starts, stops: (n,) int64 places of the part in its row.
        begin: (n,) bool, whether a document, or what stands for one, begins with the part.
        ends: (number of rows,) int64 places of each row that hold tokens.
    """

    rows: NDArray[np.int64]
    documents: NDArray[np.int64]
    skips: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    begin: NDArray[np.bool_]
    ends: NDArray[np.int64]


class Rows(Protocol):
    """The rows of a split.

    Attributes:
        count: of them.
        padding_fraction: share of the places of all rows that hold no token of a document.
    """

    count: int
    padding_fraction: float

    def parts(self, rows: NDArray[np.int64]) -> Parts:
        """What rows number ``rows`` (B,) int64 hold."""
        ...


def rows_of(pieces: Pieces, data: DataConfig, seq_length: int) -> Rows:
    """The rows of a split as ``data.packing`` asks for them."""
    if data.packing == "concatenate":
        return _Concatenated(pieces, seq_length)
    return _Packed(pieces, data, seq_length)


class _Concatenated:
    """Windows of ``seq_length + 1`` tokens with stride ``seq_length`` over all documents one after the other."""

    def __init__(self, pieces: Pieces, seq_length: int) -> None:
        self._pieces = pieces
        self._seq_length = seq_length
        self._stream = np.zeros(len(pieces) + 1, dtype=np.int64)
        np.cumsum(pieces.lengths, out=self._stream[1:])
        self.count = max(0, (int(self._stream[-1]) - 1) // seq_length)
        self.padding_fraction = 0.0

    def parts(self, rows: NDArray[np.int64]) -> Parts:
        begins, length = rows * self._seq_length, self._seq_length + 1
        first = self._stream.searchsorted(begins, side="right") - 1
        which, pieces, _ = _ranges(first, self._stream.searchsorted(begins + length, side="left"))
        begins = begins[which]
        low = self._stream[pieces] - begins
        starts = np.maximum(low, 0)
        return Parts(
            rows=which,
            documents=self._pieces.documents[pieces],
            skips=self._pieces.skips[pieces] + (starts - low),
            starts=starts,
            stops=np.minimum(self._stream[pieces + 1] - begins, length),
            begin=low >= 0,
            ends=np.full(len(rows), length, dtype=np.int64),
        )


class _Packed:
    """Whole documents, or pieces of long ones, beside each other."""

    def __init__(self, pieces: Pieces, data: DataConfig, seq_length: int) -> None:
        cut = cut_to_length(pieces, seq_length)
        capacity = seq_length + 1
        packed = (
            best_fit(cut.lengths, capacity, data.packing_buffer)
            if data.packing == "best_fit"
            else one_a_row(len(cut))
        )
        self._pieces = Pieces(cut.documents[packed.order], cut.skips[packed.order], cut.lengths[packed.order])
        self._first = packed.first
        self.count = len(packed.first) - 1
        places = self.count * capacity
        self.padding_fraction = 1 - int(cut.lengths.sum()) / places if places else 0.0

    def parts(self, rows: NDArray[np.int64]) -> Parts:
        which, pieces, last = _ranges(self._first[rows], self._first[rows + 1])
        lengths = self._pieces.lengths[pieces]
        # Places are counted through all rows first, and then from where each begins.
        through = np.cumsum(lengths)
        before = np.zeros(len(rows) + 1, dtype=np.int64)
        before[1:] = through[last]
        stops = through - before[which]
        return Parts(
            rows=which,
            documents=self._pieces.documents[pieces],
            skips=self._pieces.skips[pieces],
            starts=stops - lengths,
            stops=stops,
            begin=np.ones(len(pieces), dtype=np.bool_),
            ends=np.diff(before),
        )


def _ranges(
    first: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """All whole numbers of the ranges ``[first, end)``, (B,) int64 each, none of them empty, range by range.

    Returns:
        (n,) int64 the range that each belongs to; (n,) int64 the numbers; (B,) int64 places of the last of each range.
    """
    counts = end - first
    behind = np.cumsum(counts)
    which = np.arange(len(first)).repeat(counts)
    numbers = np.arange(len(which))
    numbers += (end - behind)[which]
    return which, numbers, behind - 1
