"""Which elements dropout keeps, as a function of a seed and an element's number: the same in backward, when activations
are computed again, on every device, and in every backend.

Four elements share a 64-bit word of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), 16 bits for each; the word's
number is the state. Of 65,536 values the first ``threshold`` drop an element, so a probability is a multiple of 1 /
65,536, and what is kept is scaled by exactly that one.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from drivetrain.errors import DrivetrainError

__all__ = ["STEPS", "kept_elements", "threshold_of"]

STEPS = 1 << 16


def threshold_of(probability: float) -> int:
    """The values, of 65,536, that drop an element.

    Raises:
        DrivetrainError: the probability is not 0 and not between the smallest and the largest that there is.
    """
    threshold = round(probability * STEPS) if 0.0 <= probability <= 1.0 else -1
    if not 0 <= threshold < STEPS or (threshold == 0) != (probability == 0.0):
        raise DrivetrainError(
            f"a dropout probability of {probability!r}: it is to be 0, or from {1 / STEPS:.6f} to {1 - 1 / STEPS:.6f}"
        )
    return threshold


def _signed(constant: int) -> int:
    """A 64-bit constant as torch's int64 has it."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def kept_elements(shape: torch.Size, seed: Tensor, threshold: int) -> Tensor:
    """Bool of ``shape`` on the device of the seed: True where an element is kept.

    Args:
        shape: what dropout acts on; elements are numbered in row-major order.
        seed: one int64.
        threshold: as of ``threshold_of``.
    """
    kept: Tensor = _kept(shape, seed, threshold)
    return kept


# Opaque to compilers. Inductor of torch 2.13 corrupts the heap with a view of int64 as int16, and takes products of
# counted numbers for indices, which may not exceed 64 bits.
@torch.library.custom_op("drivetrain::kept_elements", mutates_args=())
def _kept(shape: Sequence[int], seed: Tensor, threshold: int) -> Tensor:
    count = math.prod(shape)
    words = (count + 3) // 4
    word = torch.arange(1, words + 1, dtype=torch.int64, device=seed.device)
    word = word.mul_(_GOLDEN).add_(seed.reshape(()))
    word = _mixed(word, 30).mul_(_FIRST)
    word = _mixed(word, 27).mul_(_SECOND)
    word = _mixed(word, 31)
    # As signed numbers of 16 bits, from -32,768.
    return (word.view(torch.int16)[:count] >= threshold - STEPS // 2).view(shape)


@_kept.register_fake
def _(shape: Sequence[int], seed: Tensor, threshold: int) -> Tensor:  # noqa: ARG001 - the same arguments
    return seed.new_empty(shape, dtype=torch.bool)


def _mixed(word: Tensor, bits: int) -> Tensor:
    """``word ^ (word >> bits)`` of unsigned words; torch's shift of int64 copies the sign."""
    return (word >> bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(word)
