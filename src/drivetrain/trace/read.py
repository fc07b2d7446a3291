"""Read a profiler file of any known format.

A reader is an object with the three members of :class:`Reader`; adding a format is one more entry of
``_READERS``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from drivetrain.errors import DataError
from drivetrain.trace.kineto.reader import KinetoReader
from drivetrain.trace.kineto.source import Source
from drivetrain.trace.table import Trace

__all__ = [
    "TIMELINE_KEY",
    "Progress",
    "Reader",
    "is_timeline",
    "known_formats",
    "read_trace",
]

TIMELINE_KEY = "drivetrain_timeline"
"""Member of a document that is a timeline made of an account (``report/perfetto.py``): it reads like a trace, but
records nothing itself."""

Progress = Callable[[int, int], None]
"""Called now and then with (bytes of the file read, bytes of the file)."""


class Reader(Protocol):
    """Reads one format."""

    @property
    def format(self) -> str:
        """Its name, as :attr:`Trace.format`."""
        ...

    @property
    def description(self) -> str:
        """What it reads, in a few words, for the message about an unknown file."""
        ...

    def recognises(self, head: bytes) -> bool:
        """Whether ``head``, the first bytes of the (uncompressed) content, is of this format."""
        ...

    def read(self, path: Path, *, progress: Progress | None, cache: bool) -> Trace:
        """See :func:`read_trace`."""
        ...


_READERS: tuple[Reader, ...] = (KinetoReader(),)


def known_formats() -> dict[str, str]:
    """Name of each format → what it is."""
    return {reader.format: reader.description for reader in _READERS}


def _reader_of(path: Path) -> Reader:
    head = Source.head(path)
    for reader in _READERS:
        if reader.recognises(head):
            return reader
    known = "; ".join(f"{name} ({description})" for name, description in known_formats().items())
    raise DataError(f"{path}: {_seen(head)}; known formats: {known}")


def _seen(head: bytes) -> str:
    if not head.strip():
        return "empty: there is nothing to read"
    return f"not a trace: it starts with {head[:40]!r}"


def is_timeline(path: Path | str) -> bool:
    """Whether a file is a timeline that was made of an account.

    Raises:
        DataError: the file cannot be read.
    """
    return f'"{TIMELINE_KEY}"'.encode() in Source.head(Path(path))[:256]


def read_trace(path: Path | str, *, progress: Progress | None = None, cache: bool = True) -> Trace:
    """Read one profiler file, whole or damaged.

    Args:
        path: the file, plain or gzipped.
        progress: told how far the reading is.
        cache: look for the columns of an earlier reading, and store those of this one, in
            ``.drivetrain-cache`` beside the file, or in the user's cache where that folder is read-only.

    Returns:
        The trace. What was wrong with it is in :attr:`Trace.health`.

    Raises:
        DataError: there is nothing to read: no such file, empty, not a trace, or metadata only.
    """
    file = Path(path)
    return _reader_of(file).read(file, progress=progress, cache=cache)
