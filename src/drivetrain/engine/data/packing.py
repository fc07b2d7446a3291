"""Whole documents into sequences of one length: best-fit decreasing over a bounded number of documents at a time.

Johnson et al. 1974 for best-fit decreasing; Ding et al. 2024 (arXiv 2404.10830) for packing without cutting documents.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drivetrain.engine.data.split import Pieces

__all__ = ["PackedPieces", "best_fit", "cut_to_length", "one_a_row"]

SHORTEST = 2
"""Tokens of the shortest piece that has anything to predict."""


@dataclass(frozen=True)
class PackedPieces:
    """Which pieces each row holds.

    Attributes:
        order: (num_pieces,) int64, pieces row by row.
        first: (num_rows + 1,) int64, where each row begins in ``order``.
    """

    order: NDArray[np.int64]
    first: NDArray[np.int64]


def cut_to_length(pieces: Pieces, seq_length: int) -> Pieces:
    """Pieces of at most ``seq_length + 1`` tokens. Neighbours of one document share a token, which ends the one as a
    label and begins the other as an input: every token but the first of a document is predicted once. Pieces of one
    token predict nothing and are left out."""
    counts = np.maximum(0, -(-(pieces.lengths - 1) // seq_length))
    of = np.repeat(np.arange(len(pieces), dtype=np.int64), counts)
    within = np.arange(len(of), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    lengths = np.minimum(seq_length + 1, pieces.lengths[of] - within * seq_length)
    return Pieces(pieces.documents[of], pieces.skips[of] + within * seq_length, lengths)


def one_a_row(count: int) -> PackedPieces:
    """Each of ``count`` pieces in a row of its own."""
    return PackedPieces(np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))


def best_fit(lengths: NDArray[np.int64], capacity: int, buffer: int) -> PackedPieces:
    """Pack pieces into rows of ``capacity`` tokens: of ``buffer`` pieces at a time, the longest first, each into the
    row with the least room that holds it. The same lengths give the same rows.

    Args:
        lengths: (n,) int64, each from 1 to ``capacity``.
        capacity: tokens of a row.
        buffer: pieces that are packed with each other; the least fill is of the last rows of each.
    """
    order: list[NDArray[np.int64]] = []
    sizes: list[NDArray[np.int64]] = []
    for start in range(0, len(lengths), buffer):
        rows = _best_fit_of(lengths[start : start + buffer], capacity)
        order.append(np.fromiter((piece + start for row in rows for piece in row), dtype=np.int64))
        sizes.append(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))
    count = sum(map(len, sizes))
    first = np.zeros(count + 1, dtype=np.int64)
    if count:
        np.cumsum(np.concatenate(sizes), out=first[1:])
    return PackedPieces(np.concatenate(order) if order else np.zeros(0, np.int64), first)


def _best_fit_of(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Rows as lists of pieces."""
    rows: list[list[int]] = []
    # Rows by the room that is left in them, and bit r of one number for each room r that some row has: the least room
    # that holds a piece is the lowest bit of what is left after a shift.
    with_room: dict[int, list[int]] = {}
    rooms = 0
    longest_first = np.argsort(-lengths, kind="stable")
    for piece, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        assert 1 <= length <= capacity
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            candidates = with_room[room]
            row = candidates.pop()
            if not candidates:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(piece)
        left = room - length
        if left >= SHORTEST:
            with_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return rows
