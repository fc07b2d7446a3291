"""Numbers of a trace as int64, taken from their decimal digits: never through a float.

Times are microseconds with up to three decimals, as a number or (Ascend, merged files) as a text. A double has
53 bits: an absolute time in microseconds has no more than a quarter of a microsecond left after its point.
"""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["INVALID", "integers", "nanoseconds"]

INVALID: Final = np.iinfo(np.int64).min
"""Stands for a time that is missing or not finite, and for an identifier beyond int64."""

_LIMIT: Final = np.iinfo(np.int64).max
_SAFE_DIGITS: Final = 18
"""Digits of a number that fits int64 whatever they are."""
_SCALES: Final = np.array([1000, 100, 10, 1], dtype=np.int64)
"""What makes nanoseconds of the digits of microseconds with 0, 1, 2 or 3 decimals."""
_INTEGER: Final = re.compile(r"\s*[+-]?\d{1,20}\s*")
_PLAIN: Final = b"0123456789.,"


def _one_time(text: bytes) -> int:
    """Nanoseconds of one time in microseconds, however it is written."""
    try:
        value = Decimal(text.strip().strip(b'"').decode())
    except (InvalidOperation, UnicodeDecodeError):
        return INVALID
    if not value.is_finite():
        return INVALID
    # Never an int of a billion digits for the sake of 1e999999999.
    nanoseconds = (
        int(value.scaleb(3)) if value.adjusted() < _SAFE_DIGITS else _LIMIT * (-1 if value < 0 else 1)
    )
    return max(-_LIMIT, min(nanoseconds, _LIMIT))


def nanoseconds(texts: Sequence[msgspec.Raw]) -> NDArray[np.int64]:
    """Times in microseconds → nanoseconds, shape (n,); digits below a nanosecond are cut off.

    :data:`INVALID` where there is no finite number; the nearest int64 for one beyond its range.
    """
    joined = b",".join(texts)
    if joined and not joined.translate(None, _PLAIN):
        fast = _plain_decimals(joined, len(texts))
        if fast is not None:
            return fast
    return np.array([_one_time(bytes(text)) for text in texts], dtype=np.int64)


def _plain_decimals(joined: bytes, count: int) -> NDArray[np.int64] | None:
    """The same for ``digits[.digits]`` separated by commas, all at once; None: some are of another form."""
    characters = np.frombuffer(joined, dtype=np.uint8)
    ends = np.append(np.flatnonzero(characters == ord(",")), len(characters))
    lengths = np.diff(ends, prepend=-1) - 1
    points = np.flatnonzero(characters == ord("."))
    owners = np.searchsorted(ends, points)
    if len(points) and bool((np.diff(owners) == 0).any()):
        return None
    has_point = np.zeros(count, dtype=bool)
    has_point[owners] = True
    decimals = np.zeros(count, dtype=np.int64)
    decimals[owners] = ends[owners] - points - 1
    whole = lengths - decimals - has_point
    if whole.min() < 1 or decimals.max() > 3 or (whole + decimals).max() > _SAFE_DIGITS:
        return None
    digits = np.fromstring(joined.replace(b".", b"").decode(), dtype=np.int64, sep=",")
    assert len(digits) == count
    scale = _SCALES[decimals]
    if bool((digits > _LIMIT // scale).any()):
        return None
    return digits * scale


def _one_integer(value: object) -> int:
    if isinstance(value, str):
        value = int(value) if _INTEGER.fullmatch(value) else None
    elif isinstance(value, float):
        value = int(value) if value.is_integer() else None
    if not isinstance(value, int):
        return -1
    return value if -_LIMIT <= value <= _LIMIT else INVALID


def integers(values: Sequence[object]) -> NDArray[np.int64]:
    """Integers, or texts of integers, shape (n,): -1 for what is none, :data:`INVALID` for one beyond int64."""
    if set(map(type, values)) <= {int}:
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError:
            pass  # one of them is beyond int64: one at a time
    return np.array([_one_integer(value) for value in values], dtype=np.int64)
