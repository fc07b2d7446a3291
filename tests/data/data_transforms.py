"""Callables for ``data.transform``, good and bad. A module of its own: worker processes import it by name."""

import time

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

NOT_CALLABLE = 3


def add_one(ids: Ids) -> Ids:
    return ids + 1


def reverse_in_place(ids: Ids) -> Ids:
    ids[:] = ids[::-1].copy()
    return ids


def to_32_bits(ids: Ids) -> NDArray[np.int32]:
    return ids.astype(np.int32)


def shorten(ids: Ids) -> Ids:
    return ids[:-1]


def to_list(ids: Ids) -> list[int]:
    return [int(token) for token in ids]


def to_float(ids: Ids) -> NDArray[np.float64]:
    return ids / 1


def beyond(ids: Ids) -> Ids:
    return ids * 0 + 1_000_000


def negative(ids: Ids) -> Ids:
    return -ids - 1


def fail(ids: Ids) -> Ids:
    raise KeyError("no such thing")


def leave(ids: Ids) -> Ids:
    raise SystemExit(3)


def sleep_a_little(ids: Ids) -> Ids:
    # Against the rest of building a batch, microseconds that a busy machine makes milliseconds.
    time.sleep(0.01)
    return ids


def double_small(ids: Ids) -> Ids:
    return ids % 100 * 2


def add_one_small(ids: Ids) -> Ids:
    return ids + 1


def reverse_rows_of_batch(ids: Ids) -> Ids:
    return ids[::-1]


def first_row(ids: Ids) -> Ids:
    return ids[:1]
