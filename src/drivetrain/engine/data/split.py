"""Which documents are for training and which are held out."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from drivetrain.engine.data.order import derive_key, shuffled
from drivetrain.errors import DataError

__all__ = ["Pieces", "Split", "split_documents"]

Split = Literal["train", "validation"]
SPLIT_KEY = 0x73706C6974
"""The split does not depend on run.seed: runs with different seeds are judged on the same text."""
TOLERANCE = 2.0


@dataclass(frozen=True)
class Pieces:
    """The documents of a split in reading order; one of them may be a part.

    Attributes:
        documents: (n,) int64 indices into the corpus.
        skips: (n,) int64 tokens of the document before the piece.
        lengths: (n,) int64 tokens in the piece, at least 1.
    """

    documents: NDArray[np.int64]
    skips: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.documents)


def split_documents(lengths: NDArray[np.int64], weights: str, split: Split, seed: int) -> Pieces:
    """The documents of one split.

    All documents are put in one fixed shuffled order and cut where the weights say, at the document
    border nearest to that token. Where even the nearest border is far off (held-out text would be more
    than twice or less than half of what was asked: few, long documents) the document itself is cut.

    Args:
        lengths: (num_documents,) int64 tokens of each document; empty ones belong to no split.
        weights: ``data.split``, training and validation.
        split: which of them.
        seed: orders the training documents; held-out ones keep their order whatever the seed.
    Raises:
        DataError: the weights leave nothing.
    """
    train_weight, validation_weight = map(float, weights.split(","))
    if train_weight + validation_weight <= 0:
        raise DataError(f"data.split = {weights!r} gives weight to neither training nor validation")
    order = shuffled(len(lengths), derive_key(SPLIT_KEY))
    order = order[lengths[order] > 0]
    ends = np.cumsum(lengths[order])
    total = int(ends[-1]) if len(ends) else 0
    held_out = round(total * validation_weight / (train_weight + validation_weight))
    cut = total - held_out
    if 0 < cut < total:
        borders = ends[:-1]
        if len(borders):
            nearest = int(borders[np.argmin(np.abs(borders - cut))])
            if held_out / TOLERANCE <= total - nearest <= held_out * TOLERANCE:
                cut = nearest
    first = int(np.searchsorted(ends, cut, side="left"))
    if split == "train":
        documents = order[: first + 1] if cut else order[:0]
        skips = np.zeros(len(documents), dtype=np.int64)
        sizes = lengths[documents].astype(np.int64)
        if cut:
            sizes[-1] -= ends[first] - cut
        within = shuffled(len(documents), derive_key(SPLIT_KEY, seed))
        return Pieces(documents[within], skips[within], sizes[within])
    start = int(np.searchsorted(ends, cut, side="right"))
    documents = order[start:]
    skips = np.zeros(len(documents), dtype=np.int64)
    sizes = lengths[documents].astype(np.int64)
    if len(documents):
        skips[0] = sizes[0] - (ends[start] - cut)
        sizes[0] -= skips[0]
    return Pieces(documents, skips, sizes)
