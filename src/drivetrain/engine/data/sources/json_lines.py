"""JSON lines, plain or compressed: one document a line."""

from collections.abc import Iterator

import orjson

from drivetrain.engine.data.sources.compression import open_bytes
from drivetrain.engine.data.sources.source import Block, Lines, Position, Reading, Report, Source
from drivetrain.errors import DataError

__all__ = ["blocks", "texts"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def blocks(source: Source, start: Position, reading: Reading) -> Iterator[Block]:
    """Whole lines of ``source`` from ``start`` on, about ``reading.block_bytes`` a block.

    Raises:
        DataError: the file cannot be read, or decompressed.
    """
    offset, line = start.offset, start.line
    with open_bytes(source.path, offset) as (stream, file):
        pieces: list[bytes] = []
        while True:
            chunk = stream.read(reading.block_bytes)
            end = chunk.rfind(b"\n") + 1
            if chunk and not end:
                pieces.append(chunk)
                continue
            data = b"".join([*pieces, chunk[:end]])
            pieces = [chunk[end:]] if chunk[end:] else []
            if data:
                content = Lines(source.path, data, line)
                line += data.count(b"\n")
                offset += len(data)
                # Of a compressed file, what was read of it stands for what came out.
                read = offset if stream is file else file.tell()
                yield Block(content, Position(start.source, offset, line), read)
            if not chunk:
                return


def texts(content: Lines, reading: Reading, report: Report) -> Iterator[str]:
    """The text of each line. Blank lines are none.

    Raises:
        DataError: a broken line, where ``reading.strict``: ``file:line: reason``.
    """
    for number, line in enumerate(content.data.split(b"\n"), start=content.lines_before + 1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line.strip():
            continue
        found = _text(line, reading.json_key)
        if isinstance(found, str):
            yield found
            continue
        place = f"{content.path}:{number}: {found.reason}"
        if reading.strict:
            raise DataError(place)
        report.broken_line(place)


class _Broken:
    """Why a line holds no text."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _text(line: bytes, json_key: str) -> "str | _Broken":
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return _Broken(f"no JSON: {error}")
    if not isinstance(record, dict):
        return _Broken(f"expected an object, found {type(record).__name__}")
    if json_key not in record:
        keys = ", ".join(map(repr, list(record)[:10])) or "none"
        return _Broken(f"no key {json_key!r}; its keys: {keys}")
    text = record[json_key]
    if not isinstance(text, str):
        return _Broken(f"{json_key!r} is {type(text).__name__}, expected a string")
    return text
