"""The bytes of a trace, plain or gzipped, in blocks; a broken gzip stream gives what comes before the break."""

import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import BinaryIO, Final, Protocol, cast

from isal import isal_zlib

from drivetrain.errors import DataError

__all__ = ["BLOCK_BYTES", "Source"]

BLOCK_BYTES: Final = 1 << 20
"""Uncompressed bytes handed on at a time; about 4,000 events."""

_COMPRESSED_BYTES: Final = 1 << 16
_SALVAGE_BYTES: Final = 64
"""Compressed bytes fed at a time near a break: what the failing call would have given is lost."""
_GZIP: Final = b"\x1f\x8b"
_GZIP_WINDOW: Final = 31
_HEAD_BYTES: Final = 1 << 16


# The stubs of isal declare an instance where there is a class.
_DAMAGED: Final[tuple[type[Exception], ...]] = (cast(type[Exception], isal_zlib.error), zlib.error)


class _Inflater(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _standard_inflater() -> _Inflater:
    return zlib.decompressobj(_GZIP_WINDOW)


def _fast_inflater() -> _Inflater:
    inflater: _Inflater = isal_zlib.decompressobj(_GZIP_WINDOW)
    return inflater


class Source:
    """One file.

    After :meth:`blocks` is exhausted, ``break_reason`` says whether a gzip stream broke off and ``trailing_bytes``
    how much there was behind its end that is no gzip.
    """

    def __init__(self, path: Path, progress: Callable[[int, int], None] | None = None) -> None:
        self.path = path
        self.break_reason: str | None = None
        self.trailing_bytes = 0
        self._progress = progress

    @staticmethod
    def head(path: Path) -> bytes:
        """The first 64 KiB of the uncompressed content.

        Raises:
            DataError: the file cannot be read.
        """
        head = b""
        for block in Source(path).blocks():
            head += block
            if len(head) >= _HEAD_BYTES:
                break
        return head[:_HEAD_BYTES]

    def blocks(self) -> Generator[bytes, None, None]:
        """The uncompressed content.

        Raises:
            DataError: the file cannot be opened or read.
        """
        try:
            with self.path.open("rb") as file:
                size = self.path.stat().st_size
                compressed = file.read(2) == _GZIP
                file.seek(0)
                yield from self._inflated(file, size) if compressed else self._plain(file, size)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _report(self, done: int, size: int) -> None:
        if self._progress is not None:
            self._progress(done, size)

    def _plain(self, file: BinaryIO, size: int) -> Iterator[bytes]:
        done = 0
        while block := file.read(BLOCK_BYTES):
            done += len(block)
            self._report(done, size)
            yield block

    def _inflated(self, file: BinaryIO, size: int) -> Iterator[bytes]:
        given = 0
        try:
            for block in self._members(file, size, _fast_inflater, _COMPRESSED_BYTES):
                given += len(block)
                yield block
        except _DAMAGED:
            # The call that met the break gave nothing. Once more with the standard library, in small bites.
            file.seek(0)
            yield from self._salvaged(file, size, given)

    def _salvaged(self, file: BinaryIO, size: int, given: int) -> Iterator[bytes]:
        try:
            for block in self._members(file, size, _standard_inflater, _SALVAGE_BYTES):
                if given >= len(block):
                    given -= len(block)
                    continue
                yield block[given:]
                given = 0
        except zlib.error as error:
            self.break_reason = f"the gzip stream is damaged ({error})"

    def _members(
        self, file: BinaryIO, size: int, new_inflater: Callable[[], _Inflater], bite: int
    ) -> Iterator[bytes]:
        inflater = new_inflater()
        started = False
        gathered: list[bytes] = []
        gathered_bytes = 0
        while data := file.read(bite):
            self._report(file.tell(), size)
            while data:
                if inflater.eof:
                    if not data.startswith(_GZIP[: len(data)]):
                        self.trailing_bytes = len(data.strip(b"\x00")) and size - file.tell() + len(data)
                        data = b""
                        file.seek(0, 2)
                        break
                    inflater = new_inflater()
                try:
                    block = inflater.decompress(data)
                except _DAMAGED:
                    if gathered:
                        yield b"".join(gathered)
                    raise
                started = True
                gathered.append(block)
                gathered_bytes += len(block)
                data = inflater.unused_data if inflater.eof else b""
            if gathered_bytes >= BLOCK_BYTES:
                yield b"".join(gathered)
                gathered, gathered_bytes = [], 0
        if gathered_bytes:
            yield b"".join(gathered)
        if started and not inflater.eof:
            self.break_reason = "the gzip stream ends before its end mark"
