"""Two ways to the same outputs and gradients, for ``operators.py`` to time one against the other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Sides"]


@dataclass(frozen=True)
class Sides:
    """What is compared.

    Attributes:
        name: of the workload.
        ours, theirs: forward and backward, once; each returns its output and its gradients.
        target: at least this many times as fast; 0: nothing is claimed.
        note: what is computed, on both sides.
        peer: what the other side is made of.
        same_results: whether the two are compared before they are timed; not where each draws at random for itself.
        no_slower: whether what is claimed is that ours takes no more time, within what the measurement scatters.
    """

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    target: float
    note: str
    peer: str = "torch eager"
    same_results: bool = True
    no_slower: bool = False
