"""Transforms of a chosen cost: ``cases.transforms:scrub_40`` looks through a document forty times.

Whoever writes such a thing means well: a regular expression looks for numbers that are marked, of which there are none.
The cost is linear in the length of the document and in the number of passes, so that a case can have as much of it as
its source says.
"""

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["scrub"]

Ids = NDArray[np.int64]

_MARKED = re.compile(r"\b\d+ x")
_NAME = re.compile(r"scrub_(?P<passes>[1-9]\d{0,5})")


def scrub(passes: int) -> Callable[[Ids], Ids]:
    """The transform of so many passes: (length,) int64 token ids in, the same out."""

    def scrub_marked(ids: Ids) -> Ids:
        text = " ".join(map(str, ids.tolist()))
        for _ in range(passes):
            text = _MARKED.sub("", text)
        return np.array(text.split(), dtype=np.int64)

    scrub_marked.__name__ = scrub_marked.__qualname__ = f"scrub_{passes}"
    return scrub_marked


def __getattr__(name: str) -> Callable[[Ids], Ids]:
    found = _NAME.fullmatch(name)
    if found is None:
        raise AttributeError(f"{name}: no such transform; scrub_ and a number of passes, as in scrub_40")
    return scrub(int(found["passes"]))
