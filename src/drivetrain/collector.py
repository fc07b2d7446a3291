"""How often a process of ours looks for cycles of objects that nobody holds any more."""

import atexit
import gc

__all__ = ["collect_seldom"]

_YOUNG = 100_000
"""Objects made and not freed between two looks at the young; Python's own number, 700, has a command look a thousand
times at what its imports make to stay."""
_YOUNG_PER_MIDDLE, _MIDDLE_PER_OLD = 50, 100


def collect_seldom() -> None:
    """For the whole process, called once and before anything large is imported.

    Importing torch and its compiler took 3.7 s of processor time with Python's numbers and 2.8 s with these and an end
    without a last look (medians of three on one machine). The training loop has its own rule: it looks at chosen steps.
    """
    gc.set_threshold(_YOUNG, _YOUNG_PER_MIDDLE, _MIDDLE_PER_OLD)
    # The system takes all memory back: the interpreter's last collections would free it piece by piece.
    atexit.register(gc.freeze)
