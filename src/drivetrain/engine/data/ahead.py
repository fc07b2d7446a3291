"""A thread that builds what will be asked for next, a bounded number of items ahead."""

import queue
import threading
from collections.abc import Iterator
from typing import Generic, Self, TypeVar

from drivetrain.engine.one_core import OneCoreThread

__all__ = ["Ahead"]

Item = TypeVar("Item")
POLL_S = 0.1


class _End:
    """What an iterator ended with: an exception, or nothing."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Ahead(Iterator[Item], Generic[Item]):
    """The items of an iterator, in order, up to ``depth`` of them built before they are asked for.

    What the iterator raises is raised here, in its place. ``close`` ends the thread and waits for it.
    """

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        assert depth >= 1
        self._ready: queue.Queue[Item | _End] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._thread = OneCoreThread(
            target=_build, args=(items, self._ready, self._stopped), name="drivetrain-prefetch", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; it ends by itself when there is nothing left to build."""
        return self._thread.is_alive()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        if self._stopped.is_set():
            raise StopIteration
        item = self._ready.get()
        if not isinstance(item, _End):
            return item
        self._stopped.set()
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._stopped.set()
        self._thread.join()


def _build(items: Iterator[Item], ready: "queue.Queue[Item | _End]", stopped: threading.Event) -> None:
    end = _End(None)
    try:
        for item in items:
            if not _hand_over(item, ready, stopped):
                return
    # Raised where the item is asked for, which is not in this thread.
    except BaseException as error:  # noqa: BLE001
        end = _End(error)
    _hand_over(end, ready, stopped)


def _hand_over(item: Item | _End, ready: "queue.Queue[Item | _End]", stopped: threading.Event) -> bool:
    """Put an item where it is asked for; False where nobody will ask any more."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=POLL_S)
        except queue.Full:
            continue
        return True
    return False
