"""The legal numbers next to one that is not legal, in words."""

from collections.abc import Sequence

__all__ = ["around", "closest", "divisors"]


def around(value: int, step: int) -> str:
    """The positive multiples of ``step`` next to ``value``, in words."""
    below, above = value // step * step, -(-value // step) * step
    return f"{below} or {above}" if below >= 1 else f"{above}"


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    # Trial division up to the square root: numbers are at most about a million here.
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def closest(value: int, legal: Sequence[int]) -> str:
    """The legal values next below and next above ``value``, in words."""
    below = [candidate for candidate in legal if candidate <= value]
    above = [candidate for candidate in legal if candidate > value]
    return " or ".join(str(candidate) for candidate in [*below[-1:], *above[:1]])
