"""Tokens of the parts of some rows, out of the corpus into the rows: one pass for a whole micro-batch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.engine.data.rows import Parts

__all__ = ["PADDING", "TOKENS_WORTH_A_COPY", "fill_tokens", "mark_starts"]

PADDING = -1
"""Stands in rows where there is no token."""
TOKENS_WORTH_A_COPY = 64
"""Where parts are shorter on average, a gather of all tokens is faster than a copy for each part."""


def mark_starts(parts: Parts, starts: NDArray[np.bool_]) -> None:
    """Mark where documents and padding start. ``starts``: (B, length) bool, contiguous, all false."""
    length = starts.shape[1]
    flat = starts.reshape(-1)
    flat[(parts.rows * length + parts.starts)[parts.begin]] = True
    padded = np.flatnonzero(parts.ends < length)
    if len(padded):
        flat[padded * length + parts.ends[padded]] = True


def fill_tokens(
    parts: Parts, stored: NDArray[Any], sources: NDArray[np.int64], tokens: NDArray[np.int64]
) -> None:
    """Fill ``tokens``, (B, length) int64 and contiguous, with what the rows hold; :data:`PADDING` behind it.

    Args:
        parts: of all rows of ``tokens``.
        stored: (N,) ids of the corpus.
        sources: (n,) int64 place in ``stored`` of the first token of each part.
    """
    fill = _copy_each if len(sources) * TOKENS_WORTH_A_COPY <= tokens.size else _gather
    fill(parts, stored, sources, tokens)


def _copy_each(
    parts: Parts, stored: NDArray[Any], sources: NDArray[np.int64], tokens: NDArray[np.int64]
) -> None:
    ends = sources + parts.stops
    ends -= parts.starts
    found = [stored[start:stop] for start, stop in zip(sources.tolist(), ends.tolist(), strict=True)]
    length = tokens.shape[1]
    padded = np.flatnonzero(parts.ends < length)
    if len(padded):
        behind = parts.rows.searchsorted(padded, side="right").tolist()
        room = (length - parts.ends[padded]).tolist()
        # From the last one on: what is put in moves only what comes behind it.
        for place, count in zip(reversed(behind), reversed(room), strict=True):
            found.insert(place, np.full(count, PADDING, dtype=np.int64))
    np.concatenate(found, out=tokens.reshape(-1), casting="unsafe")


def _gather(
    parts: Parts, stored: NDArray[Any], sources: NDArray[np.int64], tokens: NDArray[np.int64]
) -> None:
    length, flat = tokens.shape[1], tokens.reshape(-1)
    counts = parts.stops - parts.starts
    number = np.arange(int(counts.sum()))
    before = np.cumsum(counts) - counts
    found = stored[number + (sources - before).repeat(counts)]
    if len(found) == len(flat):
        flat[:] = found
        return
    flat.fill(PADDING)
    flat[number + (parts.rows * length + parts.starts - before).repeat(counts)] = found
