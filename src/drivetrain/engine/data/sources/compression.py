"""Decompressed bytes of a file: gzip through isal, zstandard through pyarrow, others as they are."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, cast

from isal import isal_zlib

from drivetrain.errors import DataError, EnvironmentFault

__all__ = ["ByteStream", "open_bytes"]

GZIP = b"\x1f\x8b"
# A file may also begin with a frame that is to be skipped, as those of pzstd do; its first byte is one of sixteen.
ZSTANDARD = (b"\x28\xb5\x2f\xfd", *(bytes((0x50 + kind,)) + b"\x2a\x4d\x18" for kind in range(16)))
# The stubs of isal declare an instance where there is a class; it is no zlib.error.
_DAMAGED: Final = (EOFError, OSError, ValueError, zlib.error, cast(type[Exception], isal_zlib.error))


class ByteStream(Protocol):
    """What is read from: up to ``size`` bytes, none at the end."""

    def read(self, size: int, /) -> bytes: ...


@contextmanager
def open_bytes(path: Path, offset: int = 0) -> Iterator[tuple[ByteStream, BinaryIO]]:
    """The bytes of ``path`` from ``offset`` on, decompressed if its first bytes say so; and the file underneath.

    How far the file underneath was read (``tell``) is progress. A compressed file is decompressed from its start
    whatever ``offset`` is.

    Raises:
        DataError: it cannot be read; its compressed data are damaged or cut off.
        EnvironmentFault: zstandard without pyarrow.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            file.seek(0)
            if magic.startswith(GZIP):
                stream: ByteStream = _gzip(file)
            elif magic in ZSTANDARD:
                stream = _zstandard(path, file)
            else:
                file.seek(offset)
                yield file, file
                return
            with _damage_named(path):
                _skip(stream, offset)
                yield stream, file
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _gzip(file: BinaryIO) -> ByteStream:
    from isal import igzip

    stream: ByteStream = igzip.IGzipFile(fileobj=file, mode="rb")  # type: ignore[no-untyped-call]
    return stream


def _zstandard(path: Path, file: BinaryIO) -> ByteStream:
    try:
        import pyarrow
    except ImportError as error:
        raise EnvironmentFault(
            f"{path}: reading zstandard needs pyarrow, which is not installed; `pip install 'drivetrain[train]'`"
        ) from error
    stream: Any = pyarrow.input_stream(file, compression="zstd")
    return _ArrowStream(stream)


class _ArrowStream:
    """pyarrow's stream, which closes the file underneath when it is collected, as one that is read only."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, size: int, /) -> bytes:
        """Up to ``size`` bytes."""
        return bytes(self._stream.read(size))


def _skip(stream: ByteStream, count: int) -> None:
    while count:
        data = stream.read(min(count, 1 << 20))
        if not data:
            return
        count -= len(data)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except _DAMAGED as error:
        raise DataError(
            f"{path} is damaged or cut off: its compressed data cannot be read ({error})"
        ) from error
