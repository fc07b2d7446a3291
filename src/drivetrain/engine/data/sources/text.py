"""Text files, each a document: small ones several to a block, a long one in fragments."""

import codecs
import re
from collections.abc import Iterator, Sequence

from drivetrain.engine.data.duplicates import DocumentDigest
from drivetrain.engine.data.sources.source import (
    Block,
    FileTexts,
    Fragment,
    LeftOut,
    Position,
    Reading,
    Report,
    Source,
)
from drivetrain.errors import DataError

__all__ = ["blocks", "fragments", "is_long", "texts"]

UNREADABLE = "unreadable files"
NO_TEXT = "files that are no UTF-8 text"
MOST_FILES = 1024
"""Files in one block, however small."""
SAFE_CUT = re.compile(rb"[!-~]\n(?=[0-9A-Za-z])")
"""A single line break between a printed character and a letter or digit: pre-tokenizers of byte-level tokenizers cut
behind it too, so that the ids of the parts are those of the whole. (``tokenizer.pieces_of`` cuts there as well.)"""


def is_long(source: Source, reading: Reading) -> bool:
    """Whether it is read in fragments."""
    return reading.split_long and source.size > 2 * reading.block_bytes


def blocks(sources: Sequence[Source], first: int, reading: Reading) -> Iterator[Block]:
    """Blocks of ``sources``, consecutive text files that are not long; the first has the number ``first``."""
    group: list[Source] = []
    size = 0
    for number, source in enumerate(sources, start=first):
        group.append(source)
        size += source.size
        if size >= reading.block_bytes or len(group) >= MOST_FILES or number == first + len(sources) - 1:
            yield Block(FileTexts(tuple(group)), Position(number + 1))
            group, size = [], 0


def texts(content: FileTexts, report: Report) -> Iterator[str]:
    """The text of each file.

    Raises:
        DataError: a named file cannot be read, or is no UTF-8 text.
    """
    for source in content.sources:
        try:
            data = source.path.read_bytes()
        except OSError as error:
            report.skipped[_left_out(source, f"cannot be read: {error.strerror}", UNREADABLE)] += 1
            continue
        try:
            if b"\0" in data:
                raise ValueError("it holds zero bytes")
            text = data.decode("utf-8")
        except ValueError as error:
            report.skipped[_left_out(source, f"is no UTF-8 text: {error}", NO_TEXT)] += 1
            continue
        yield text


def _left_out(source: Source, what: str, reason: str) -> str:
    """The reason to count. Raises DataError for a file that was named."""
    if source.named:
        raise DataError(f"{source.path} {what}")
    return reason


def fragments(source: Source, start: Position, reading: Reading) -> Iterator[Block]:
    """The fragments of a long text file from ``start`` on.

    The file is looked through once before: whether it is a text, and the digest of the whole.

    Raises:
        DataError: a named file cannot be read, or is no UTF-8 text.
    """
    try:
        digest = _look_through(source, reading)
    except OSError as error:
        reason = _left_out(source, f"cannot be read: {error.strerror}", UNREADABLE)
        yield Block(LeftOut(reason), Position(start.source + 1))
        return
    except ValueError as error:
        reason = _left_out(source, f"is no UTF-8 text: {error}", NO_TEXT)
        yield Block(LeftOut(reason), Position(start.source + 1))
        return
    try:
        yield from _cut(source, start, reading, digest)
    except OSError as error:
        # A part of it is in the corpus already.
        raise DataError(f"{source.path} cannot be read: {error.strerror}") from error


def _look_through(source: Source, reading: Reading) -> bytes:
    decoder = codecs.getincrementaldecoder("utf-8")()
    digest = DocumentDigest()
    with source.path.open("rb") as file:
        while data := file.read(reading.block_bytes):
            if b"\0" in data:
                raise ValueError("it holds zero bytes")
            decoder.decode(data)
            digest.update(data)
    decoder.decode(b"", final=True)
    return digest.value()


def _cut(source: Source, start: Position, reading: Reading, digest: bytes) -> Iterator[Block]:
    offset = start.offset
    with source.path.open("rb") as file:
        file.seek(offset)
        pending = b""
        searched = reading.block_bytes
        while True:
            data = file.read(reading.block_bytes)
            pending += data
            # A cut needs the byte behind it.
            found = SAFE_CUT.search(pending, searched) if len(pending) > searched else None
            while found is not None:
                part, pending = pending[: found.end()], pending[found.end() :]
                offset += len(part)
                yield Block(Fragment(part, False, digest), Position(start.source, offset), offset)
                searched = reading.block_bytes
                found = SAFE_CUT.search(pending, searched) if len(pending) > searched else None
            if not data:
                yield Block(Fragment(pending, True, digest), Position(start.source + 1))
                return
            searched = max(searched, len(pending) - 2)
