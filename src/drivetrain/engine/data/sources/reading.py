"""All sources as one sequence of blocks, and the texts of a block."""

from collections.abc import Iterator, Sequence

from drivetrain.engine.data.sources import json_lines, mds, samples, tables, text, webdataset
from drivetrain.engine.data.sources.source import (
    START,
    Block,
    Content,
    FileTexts,
    Fragment,
    LeftOut,
    Lines,
    Position,
    Reading,
    Report,
    Samples,
    Source,
)

__all__ = ["blocks_of", "texts_of"]


def blocks_of(sources: Sequence[Source], reading: Reading, start: Position = START) -> Iterator[Block]:
    """The blocks of ``sources`` from ``start`` on, in order.

    Which documents there are, and their order, does not depend on ``start`` or on how blocks are cut.

    Raises:
        DataError: a source that cannot be read; see the kinds.
    """
    number = start.source
    while number < len(sources):
        source = sources[number]
        at = Position(number, start.offset, start.line) if number == start.source else Position(number)
        if source.kind == "jsonl":
            yield from json_lines.blocks(source, at, reading)
        elif source.kind == "mds":
            yield from mds.blocks(source, at, reading)
        elif source.kind == "webdataset":
            yield from webdataset.blocks(source, at, reading)
        elif source.kind != "text":
            yield from tables.blocks(source, at, reading)
        elif text.is_long(source, reading):
            yield from text.fragments(source, at, reading)
        else:
            end = number + 1
            while (
                end < len(sources) and sources[end].kind == "text" and not text.is_long(sources[end], reading)
            ):
                end += 1
            yield from text.blocks(sources[number:end], number, reading)
            number = end
            continue
        number += 1


def texts_of(content: Content, reading: Reading, report: Report) -> Iterator[str]:
    """The texts of a block, empty ones included. What is left out is counted in ``report``.

    Raises:
        DataError: a named file that is no text; a broken line or sample where ``reading.strict``.
    """
    if isinstance(content, FileTexts):
        return text.texts(content, report)
    if isinstance(content, Lines):
        return json_lines.texts(content, reading, report)
    if isinstance(content, Samples):
        return samples.texts(content, reading, report)
    if isinstance(content, Fragment):
        return iter((content.data.decode("utf-8"),))
    if isinstance(content, LeftOut):
        report.skipped[content.reason] += 1
        return iter(())
    return tables.texts(content, report)
