"""Seeded orders that need no memory and never change: the basis of reproducible, resumable data.

numpy does not promise the same permutation from version to version, and a stored one costs memory and
time for large corpora. Here a permutation is a function of (index, size, key): a Feistel network whose
round function is splitmix64 (Steele, Lea, Flood 2014), walked until it lands inside the range
("cycle walking", Black and Rogaway 2002).
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["derive_key", "hash64", "permute", "shuffled"]

ROUNDS = 6
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def derive_key(*parts: int) -> int:
    """One 64-bit key from several whole numbers."""
    key = 0
    for part in parts:
        # The arithmetic of hash64 on whole numbers of Python: an array of one costs ten times as much.
        mixed = ((part & MASK) + (key + 1) * GOLDEN) & MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        key = mixed ^ (mixed >> 31)
    return key


def hash64(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """splitmix64's finaliser of ``values`` + key, elementwise; uint64 in, same shape uint64 out."""
    mixed = values + np.uint64(((key + 1) * GOLDEN) & MASK)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permute(indices: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Where each index goes under the permutation of ``range(size)`` that ``key`` names.

    Args:
        indices: (n,) int64 in ``[0, size)``.
        size: number of elements.
        key: names the permutation.
    Returns:
        (n,) int64 in ``[0, size)``; distinct for distinct indices.
    """
    assert size >= 1
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low_bits = np.uint64((1 << int(half)) - 1)
    keys = [derive_key(key, number) for number in range(ROUNDS)]
    result = indices.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        values = result[outside]
        left, right = values >> half, values & low_bits
        for round_key in keys:
            left, right = right, left ^ (hash64(right, round_key) & low_bits)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def shuffled(count: int, key: int) -> NDArray[np.int64]:
    """(count,) int64: ``range(count)`` in the seeded order that ``key`` names."""
    return np.argsort(hash64(np.arange(count, dtype=np.uint64), key), kind="stable").astype(np.int64)
