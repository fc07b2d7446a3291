"""Append-only files of JSON lines: one write a line when writing, a torn last line forgiven when reading."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from drivetrain.archive.atomic import write_fault
from drivetrain.archive.encoding import restore_non_finite
from drivetrain.errors import RunError

__all__ = ["LineWriter", "read_first", "read_lines", "read_tail"]

_TAIL_BYTES = 65_536


class LineWriter:
    """Appends lines to one file, each with a single ``write()``.

    Nothing is buffered in the process, so a killed one loses no line that was written. Lines are not
    fsynced one by one; ``sync()`` does it where a line must survive a power cut.
    """

    def __init__(self, path: Path, *, on_fault: Callable[[str], None] | None = None) -> None:
        """Open ``path`` for appending; a torn last line of an earlier writer is cut off first.

        Args:
            path: the file; made when missing.
            on_fault: told once when a line cannot be written (then lines are lost, and counted in
                ``lost``, until writing works again). None: :class:`EnvironmentFault` is raised.
        """
        self.path = path
        self.lost = 0
        self.on_fault = on_fault
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise write_fault(path, error, "the file could not be opened") from error
        _cut_torn_tail(self._descriptor)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one object. Its values must be what JSON can hold (``encode_number``)."""
        self.write_bytes(orjson.dumps(line))

    def write_bytes(self, document: bytes) -> None:
        """Append one object that is JSON already, without its newline."""
        data = document + b"\n"
        written = 0
        try:
            # One write, but on a full disk: what fits is written and only the next attempt says why.
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            if written:
                self._take_back(written)
            self._fault(error)

    def sync(self) -> None:
        """Make every line so far survive a power cut."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._fault(error)

    def close(self) -> None:
        """Close the file; writing to it afterwards is a bug. Closing twice is not."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _take_back(self, written: int) -> None:
        # Without this the next line would be glued to the torn one. Only our own torn end is cut: with
        # O_APPEND the position after a write is the end of what was written.
        end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        if os.fstat(self._descriptor).st_size == end:
            os.ftruncate(self._descriptor, end - written)

    def _fault(self, error: OSError) -> None:
        fault = write_fault(self.path, error, "the line is lost")
        if self.on_fault is None:
            raise fault from error
        if self.lost == 0:
            self.on_fault(str(fault))
        self.lost += 1


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _torn_bytes(descriptor: int) -> tuple[int, int]:
    """Size of the file, and how many bytes at its end belong to no whole line."""
    size = os.fstat(descriptor).st_size
    start, tail = size, b""
    while start > 0 and tail.count(b"\n") < 2:
        start = max(0, start - _TAIL_BYTES)
        tail = os.pread(descriptor, size - start, start)
    last = tail[tail.rfind(b"\n", 0, max(0, len(tail) - 1)) + 1 :]
    whole = not last or (last.endswith(b"\n") and _is_object(last))
    return size, 0 if whole else len(last)


def _cut_torn_tail(descriptor: int) -> None:
    size, torn = _torn_bytes(descriptor)
    if torn:
        # Another process may be in the middle of its write; that lasts microseconds.
        time.sleep(0.05)
        if _torn_bytes(descriptor) == (size, torn):
            os.ftruncate(descriptor, size - torn)


def _parse(path: Path, data: bytes, *, first_line: int | None) -> list[dict[str, Any]]:
    """Whole lines of ``data``. ``first_line`` is the number of its first line; None: not known."""
    pieces = data.split(b"\n")
    pieces.pop()  # What follows the last newline: nothing, or a torn line.
    may_hold_non_finite = b'"NaN"' in data or b'Infinity"' in data
    lines: list[dict[str, Any]] = []
    for index, piece in enumerate(pieces):
        try:
            line = orjson.loads(piece)
        except orjson.JSONDecodeError:
            line = None
        if not isinstance(line, dict):
            if index == len(pieces) - 1 and data.endswith(b"\n"):
                break
            where = f"line {first_line + index}" if first_line is not None else "a line near the end"
            raise RunError(
                f"{path} is damaged at {where}: not a JSON object ({piece[:40]!r}); only the last line of a "
                f"file may be incomplete. Restore the file from a copy, or delete that line to read the rest"
            )
        lines.append(restore_non_finite(line) if may_hold_non_finite else line)
    return lines


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line of ``path``, oldest first; a file that does not exist has none.

    A last line that is incomplete (its writer was killed, or is writing right now) is left out.

    Raises:
        RunError: another line is damaged; names file and line.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    return _parse(path, data, first_line=1)


def read_first(path: Path) -> dict[str, Any] | None:
    """The first line of ``path``; None while it is not there as a whole."""
    try:
        with path.open("rb") as file:
            data = file.readline()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    lines = _parse(path, data, first_line=1)
    return lines[0] if lines else None


def read_tail(path: Path, max_bytes: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """The whole lines in the last ``max_bytes`` of ``path``: enough for a live view of a file of any size."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - max_bytes)
            file.seek(start)
            data = file.read(size - start)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    if start > 0:
        data = data[data.find(b"\n") + 1 :]
    return _parse(path, data, first_line=None if start else 1)
