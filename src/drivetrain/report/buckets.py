"""A curve of any length in as few points as a figure has columns, without losing a spike.

Of each column of pixels the first, the least, the greatest and the last value are kept, in their order: the line
drawn through them covers the same pixels as the line through all. A value that is not finite breaks the line and is
handed back, to be marked.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Curve", "Gap", "min_max_buckets"]

Point = tuple[float, float]


@dataclass(frozen=True)
class Gap:
    """Values that are not finite in one column."""

    first: float
    last: float
    """Their first and last place on the x axis."""
    count: int
    words: str
    """``NaN``, ``Infinity``, ``-Infinity``, or several of them."""

    @property
    def below(self) -> bool:
        """Whether all of them are minus infinity, which is marked at the bottom."""
        return self.words == "-Infinity"


@dataclass(frozen=True)
class Curve:
    """What is drawn: unbroken pieces, and where the curve has no finite value."""

    pieces: tuple[tuple[Point, ...], ...]
    gaps: tuple[Gap, ...]


def min_max_buckets(xs: Sequence[float], ys: Sequence[float | None], columns: int) -> Curve:
    """Reduce a curve to ``columns`` buckets of equal width.

    Args:
        xs: finite and not decreasing.
        ys: values; None is simply not there and does not break the line.
        columns: at least 1.
    """
    assert len(xs) == len(ys)
    assert columns >= 1
    if not xs:
        return Curve((), ())
    start, width = xs[0], (xs[-1] - xs[0]) / columns
    pieces: list[list[Point]] = [[]]
    bucket: list[Point] = []
    place = 0
    broken: dict[int, list[Point]] = {}

    def close() -> None:
        pieces[-1].extend(_extremes(bucket))
        bucket.clear()

    for x, y in zip(xs, ys, strict=True):
        if y is None:
            continue
        column = min(int((x - start) / width), columns - 1) if width else 0
        if column != place:
            close()
            place = column
        if math.isfinite(y):
            bucket.append((x, y))
            continue
        broken.setdefault(column, []).append((x, y))
        close()
        if pieces[-1]:
            pieces.append([])
    close()
    gaps = tuple(
        Gap(points[0][0], points[-1][0], len(points), _words(y for _, y in points))
        for points in broken.values()
    )
    return Curve(tuple(tuple(piece) for piece in pieces if piece), gaps)


def _extremes(bucket: Sequence[Point]) -> list[Point]:
    """First, least, greatest and last of a bucket, in their order, each once."""
    if len(bucket) <= 4:
        return list(bucket)
    values = [y for _, y in bucket]
    kept = {0, values.index(min(values)), values.index(max(values)), len(bucket) - 1}
    return [bucket[index] for index in sorted(kept)]


def _words(values: Iterable[float]) -> str:
    found = {"NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity" for value in values}
    return " and ".join(sorted(found))
