"""Python's garbage collections in a trace, whoever asked for them: the profiler sees its own records alone.

torch records collections only together with all Python functions, which costs more than it tells.
"""

import gc
from typing import Any

from torch.profiler import record_function

__all__ = ["RecordedCollections"]

_RANGE = "python gc"
"""A name of no loop: a collection on a thread that does not train must not make that thread one that does."""


class RecordedCollections:
    """From :meth:`begin` to :meth:`end` each collection is a range, on the thread that it stops."""

    def __init__(self) -> None:
        self._open: record_function | None = None

    def begin(self) -> None:
        """Before recording starts."""
        gc.callbacks.append(self._note)

    def end(self) -> None:
        """After recording has stopped. Nothing happens where it was never begun."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)
        self._open = None

    def _note(self, phase: str, _info: dict[str, Any]) -> None:
        # There is never a second one before the first has ended, and both calls are made by one thread.
        if phase == "start":
            self._open = record_function(_RANGE)
            self._open.__enter__()
        elif self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
