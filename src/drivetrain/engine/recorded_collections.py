"""Python's garbage collections in a trace, whoever asked for them: the profiler sees its own records alone.

torch records collections only together with all Python functions, which costs more than it tells.
"""

import gc
from typing import Any

from torch.profiler import record_function
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["RecordedCollections"]

_RANGE = "python gc"
"""A name of no loop: a collection on a thread that does not train must not make that thread one that does."""


class RecordedCollections:
    """From :meth:`begin` to :meth:`end` each collection is a range, on the thread that it stops.

    Those that fall into a compilation are none: what torch traces has a range of its own, and a record that is opened
    meanwhile would be traced as an operator of the graph, or fail.
    """

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
            if not _is_tracing():
                span = record_function(_RANGE)
                span.__enter__()
                self._open = span
        elif self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def _is_tracing() -> bool:
    """Whether a mode of torch's own takes each operator of this thread; others see the range and pass it on."""
    modes = _get_current_dispatch_mode_stack()
    return any(type(mode).__module__.startswith("torch.") for mode in modes)
