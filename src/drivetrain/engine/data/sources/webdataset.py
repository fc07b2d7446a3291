"""WebDataset: tar archives in which consecutive members of one name make a sample; its text is a document.

Read through Python's own tar reader and not through the library of that name, which ends without a word where a header
is damaged, follows ``pipe:`` addresses to the shell, and unpickles what it decodes. Which members make a sample is its
rule; one without a suffix belongs to none. Archives that hold pickles are refused: nothing is unpickled.
"""

import re
import tarfile
from collections.abc import Iterator
from typing import Any

from drivetrain.engine.data.sources.compression import open_bytes
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
        return Sample(self.key, "none", ", ".join(f".{one}" for one in sorted(self.suffixes)).encode())


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


def _samples(source: Source, stream: Any, skip: int) -> Iterator[Sample]:
    """All samples; of the first ``skip`` nothing is read."""
    current: _Sample | None = None
    number = 0
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:
        for member in archive:
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
