"""A process that ends with the one that started it, even if that is killed with SIGKILL."""

import ctypes
import os
import signal
import sys

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal this process gets when its parent dies."""


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Send this process ``number`` when its parent, process ``parent``, ends. Linux only; elsewhere nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        # It has died in the meantime.
        os.kill(os.getpid(), number)
