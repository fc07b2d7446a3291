"""How long each operation of the data pipeline takes, by name: what finds the slow one."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["READ", "COLLATE", "SAMPLE_CACHE", "OperationTimes"]

READ = "read"
"""Tokens out of the memory-mapped corpus."""
COLLATE = "collate"
"""Masks, positions and document borders of a micro-batch."""
SAMPLE_CACHE = "sample_cache"
"""Sequences out of the sample cache, and into it."""


class OperationTimes:
    """Seconds by operation: :data:`READ`, :data:`COLLATE`, :data:`SAMPLE_CACHE`, and each transform by its path."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def of(self, operation: str) -> Iterator[None]:
        """Time what happens inside; operations timed meanwhile are taken off, so that the sum is that of all."""
        inner_before = sum(self._seconds.values())
        before = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - before
            inner = sum(self._seconds.values()) - inner_before
            self.add(operation, elapsed - inner)

    def add(self, operation: str, seconds: float) -> None:
        """Add to what ``operation`` took."""
        self._seconds[operation] = self._seconds.get(operation, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """All since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken
