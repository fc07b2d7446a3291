"""Signals that ask a run to stop: state is saved at the end of the step, then the run ends.

A second SIGINT does not wait: it raises KeyboardInterrupt where the program stands.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequest"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """While it holds signals, SIGINT, SIGTERM and a closed terminal's SIGHUP set :attr:`requested`.

    In ``with`` it holds them to the end; :meth:`hold` may have begun before, so that there is no instant in between.
    """

    def __init__(self) -> None:
        self.requested = False
        self.signal_name: str | None = None
        self._interrupts = 0
        self._before: dict[int, Any] = {}

    def hold(self) -> None:
        """Hold signals from now on. Safe to call twice."""
        # Python delivers signals to the main thread only; a run in another thread cannot catch them.
        if not self._before and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # nohup ignores SIGHUP so that a run outlives its terminal; that is left as it is.
                if number == signal.SIGHUP and signal.getsignal(number) != signal.SIG_DFL:
                    continue
                self._before[number] = signal.signal(number, self._on_signal)

    def release(self) -> None:
        """Leave signals to whoever had them before. Safe to call twice."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def __enter__(self) -> "StopRequest":
        self.hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        self.requested = True
        self.signal_name = signal.Signals(number).name
