"""A transform that makes a loader slow, as one does that asks a service about each document (its licence, its score).

Named in a configuration as ``data.transform=examples.slow_transform:look_up``, from the repository's root.
"""

import time

import numpy as np
from numpy.typing import NDArray

__all__ = ["ANSWER_S", "look_up"]

ANSWER_S = 0.016
"""How long the service takes for one document. The processor is idle meanwhile."""


def look_up(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """(length,) int64 token ids of a document, unchanged, after the answer has come."""
    time.sleep(ANSWER_S)
    return ids
