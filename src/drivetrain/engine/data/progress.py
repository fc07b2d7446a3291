"""How long work on a corpus says where it is: a callback, so that nothing here knows a terminal."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Progress", "ProgressCallback", "silent"]


@dataclass(frozen=True)
class Progress:
    """A moment of long work.

    Attributes:
        phase: what is being done, in words.
        done: how much of it, in ``unit``.
        total: how much there is; None where that is not known.
        unit: ``bytes``, ``tokens`` or ``""``.
    """

    phase: str
    done: int = 0
    total: int | None = None
    unit: str = ""


ProgressCallback = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """The callback of a caller who does not want to know."""
    del progress
