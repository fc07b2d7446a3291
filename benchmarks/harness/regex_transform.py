"""A regular expression that makes a loader slow, planted as ``data.transform``.

Whoever writes such a pattern means well: it looks for a marked run of numbers, and backs up from every number to the
end of its line, so that its time grows with the square of a line's length.
"""

import re

import numpy as np
from numpy.typing import NDArray

__all__ = ["drop_marked"]

PATTERN = re.compile(r"(\d+ )+x")
LINE = 256
"""Ids in a line of the text that is searched: so long documents do not take all the time."""
TIMES = 2


def drop_marked(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """(length,) int64 token ids of a document, less those before a mark, of which there is none: all of them."""
    numbers = [f"{one} " for one in ids.tolist()]
    text = "\n".join("".join(numbers[start : start + LINE]) for start in range(0, len(numbers), LINE))
    for _ in range(TIMES):
        text = PATTERN.sub("", text)
    return np.array(text.split(), dtype=np.int64)
