"""WebDataset: tar archives in which consecutive members of one name make a sample; its text is a document.

Read through Python's own tar reader and not through the library of that name, which ends without a word where a header
is damaged, follows ``pipe:`` addresses to the shell, and unpickles what it decodes. Which members make a sample is its
rule; one without a suffix belongs to none. Archives that hold pickles are refused: nothing is unpickled.
"""

import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from drivetrain.engine.data.sources.compression import ByteStream, open_bytes
from drivetrain.engine.data.sources.source import Block, Position, Reading, Sample, Samples, Source
from drivetrain.errors import DataError

__all__ = ["blocks"]

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")
"""Key and suffix: what stands before the first dot of the last part, and behind it."""
_META = re.compile(r"__[^/]*__($|/)")
PICKLES = frozenset(("pyd", "pickle", "pkl", "pth", "pt"))
TEXTS = ("txt", "text")
JSON = "json"
AT_ONCE = 1 << 20
MOST_EMPTY_READS = 16
_CRAFTED = (ValueError, LookupError, OverflowError, RecursionError)
"""What the tar reader lets pass, besides its own exceptions, where a header was made up."""


class _Header(tarfile.TarInfo):
    """A header that must be one, or the end mark: the tar reader takes any other for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str | None, errors: str) -> "_Header":
        try:
            return super().frombuf(buf, encoding, errors)  # type: ignore[arg-type]
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise _Damage(f"{error}, where a member or the end mark is expected") from error


class _Damage(Exception):
    """Not one of the exceptions that the tar reader handles by itself."""


class _Ending:
    """A stream that may be read at its end, and not over and over: the tar reader skips a member by reading, and one of
    2**62 bytes would take it years to find that they are not there."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._empty_reads = 0

    def read(self, size: int, /) -> bytes:
        data = self._stream.read(size)
        self._empty_reads = 0 if data else self._empty_reads + 1
        if self._empty_reads > MOST_EMPTY_READS:
            raise _Damage("it ends before a member does")
        return data


class _Sample:
    """Members of one key, as they come."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.suffixes: set[str] = set()
        self.text: bytes | None = None
        self.json: bytes | None = None

    def finished(self) -> Sample:
        if self.text is not None:
            return Sample(self.key, "text", self.text)
        if self.json is not None:
            return Sample(self.key, "object", self.json)
        found = ", ".join(f".{one}" for one in sorted(self.suffixes))
        return Sample(self.key, "none", found.encode())


def blocks(source: Source, start: Position, reading: Reading) -> Iterator[Block]:
    """Samples of the archive ``source`` from number ``start.offset`` on, about ``reading.block_bytes`` a block.

    Raises:
        DataError: a damaged archive, or one that is cut off; pickles; two members of one name.
    """
    with open_bytes(source.path) as (stream, file):
        held: list[Sample] = []
        size, number = 0, 0
        try:
            for sample in _samples(source, stream, start.offset):
                number += 1
                if number <= start.offset:
                    continue
                held.append(sample)
                size += len(sample.data)
                if size >= reading.block_bytes:
                    yield Block(
                        Samples(source.path, tuple(held)), Position(start.source, number), file.tell()
                    )
                    held, size = [], 0
        except (tarfile.TarError, _Damage) as error:
            raise DataError(f"{source.path} is damaged, cut off, or no tar archive: {error}") from error
    if held:
        yield Block(Samples(source.path, tuple(held)), Position(start.source, number), source.size)


def _opened(stream: ByteStream) -> tarfile.TarFile:
    with _headers_named():
        # A name in another encoding than UTF-8 is shown and kept with escapes.
        return tarfile.open(
            fileobj=cast(Any, _Ending(stream)),
            mode="r|",
            tarinfo=_Header,
            encoding="utf-8",
            errors="backslashreplace",
        )


def _next(members: Iterator[tarfile.TarInfo]) -> tarfile.TarInfo | None:
    with _headers_named():
        return next(members, None)


@contextmanager
def _headers_named() -> Iterator[None]:
    try:
        yield
    except _CRAFTED as error:
        raise _Damage(f"a header cannot be read ({type(error).__name__}: {error})") from error


def _samples(source: Source, stream: Any, skip: int) -> Iterator[Sample]:
    """All samples; of the first ``skip`` nothing is read."""
    current: _Sample | None = None
    number = 0
    with _opened(stream) as archive:
        members = iter(archive)
        while (member := _next(members)) is not None:
            # Otherwise the archive remembers all of them.
            archive.members = []  # type: ignore[attr-defined]
            if not member.isreg() or _META.match(member.name):
                continue
            match = _NAME.match(member.name)
            if match is None:
                continue
            key, suffix = match[1], match[2].lower()
            if not PICKLES.isdisjoint(suffix.split(".")):
                raise DataError(
                    f"{source.path}: member {member.name!r} is pickled, and nothing is unpickled here: whoever wrote "
                    "it could run anything; write the archive again without it"
                )
            if current is None or current.key != key:
                if current is not None:
                    yield current.finished()
                    number += 1
                current = _Sample(key)
            if suffix in current.suffixes:
                raise DataError(f"{source.path}: two members of the name {member.name!r} in one sample")
            current.suffixes.add(suffix)
            if number < skip or suffix not in (*TEXTS, JSON):
                continue
            if member.issparse():
                raise _Damage(f"member {member.name!r} is a file with holes, which no text has")
            content = archive.extractfile(member)
            assert content is not None
            data = content.read()
            if suffix == JSON:
                current.json = data
            elif current.text is None:
                current.text = data
        rest = archive.fileobj
        assert rest is not None
        while data := rest.read(AT_ONCE):
            if data.count(0) != len(data):
                raise _Damage(
                    "data stand behind its end mark; archives that were joined are given one by one"
                )
    if current is not None:
        yield current.finished()
