"""Find where events begin and end in JSON text, knowing about strings, not about layout.

Works on bytes, so that text which is no UTF-8 or holds control characters is scanned like any other. Two
exporters lay the same records out differently (several lines a record, or one), and both changed over the years:
nothing here looks at line breaks.
"""

import re
from collections import deque
from collections.abc import Iterator
from typing import Final, Literal

__all__ = [
    "MOST_RECORD_BYTES",
    "Place",
    "last_boundary",
    "last_match",
    "next_object",
    "object_end",
    "record_starts",
    "split_objects",
]

_BRACKET: Final = re.compile(rb'[^"{}\[\]]*+(?:"(?:[^"\\]|\\.)*+"[^"{}\[\]]*+)*+([{}\[\]])', re.DOTALL)
"""Up to and with the next bracket outside strings. Possessive: text that cannot match fails in linear time."""

_BOUNDARY: Final = re.compile(rb"\}\s*,\s*(?=\{)")
"""Between two objects of one array, if it is outside a string and at the right depth."""

_RECORD_START: Final = re.compile(
    rb'\{\s*(?:"args"\s*:\s*\{|(?:"(?!ph")\w{1,16}"\s*:\s*(?:"(?:[^"\\]|\\.){0,4096}+"|[^{}\[\],"]{0,64}+)\s*,\s*)*+"ph"\s*:\s*"[A-Za-z]")',
    re.DOTALL,
)
"""What a record begins with, up to its phase. Never inside a string, where the quotes would be escaped."""

Place = Literal["object", "open", "closed", "end"]

MOST_RECORD_BYTES: Final = 1 << 18
"""Longest record that is recognised in damaged text."""

_WINDOWS: Final = (1 << 12, 1 << 16)
"""How far back from the end to look for a boundary, before all of the text."""


def last_match(pattern: re.Pattern[bytes], text: bytes, start: int = 0) -> re.Match[bytes] | None:
    """The last match of a pattern from ``start``."""
    matches = deque(pattern.finditer(text, start), maxlen=1)
    return matches[0] if matches else None


def last_boundary(text: bytes) -> tuple[int, int] | None:
    """(end of one record, start of the next) for what looks like the last boundary between records.

    Only looks like: it may lie in a string or between nested objects. The text before it then does not decode,
    as a quote or a bracket is missing there.
    """
    for window in (*_WINDOWS, len(text)):
        found = last_match(_BOUNDARY, text, max(0, len(text) - window))
        if found is not None:
            return found.start() + 1, found.end()
        if window >= len(text):
            break
    return None


def object_end(text: bytes, start: int, depth: int = 0, limit: int | None = None) -> int | None:
    """End of the object that begins at ``start``, or that is open there ``depth`` brackets deep.

    None if the text, or the first ``limit`` bytes from ``start``, end before it.
    """
    stop = len(text) if limit is None else min(len(text), start + limit)
    position = start
    while (found := _BRACKET.match(text, position, stop)) is not None:
        position = found.end()
        depth += 1 if found[1] in b"{[" else -1
        if depth <= 0:
            return position
    return None


def next_object(text: bytes, start: int) -> tuple[Place, int, int]:
    """What comes next in an array, from ``start``, which is in the array and between two objects.

    Returns:
        ``object``, begin, end; or ``open``, begin of an incomplete object, end of the text; or ``closed``, position
        of the bracket that ends the array, twice; or ``end``, the end of the text, twice. An object of more than
        :data:`MOST_RECORD_BYTES` counts as incomplete, lest every missing quote costs a look at all of the text.
    """
    depth = 0
    opened = position = start
    while (found := _BRACKET.match(text, position, opened + MOST_RECORD_BYTES)) is not None:
        position = found.end()
        bracket = found[1]
        if bracket in b"{[":
            if depth == 0:
                opened = position - 1
            depth += 1
        elif depth == 0:
            if bracket == b"]":
                return "closed", position - 1, position - 1
            # A brace that closes nothing is no bracket of the array.
        else:
            depth -= 1
            if depth == 0 and bracket == b"}":
                return "object", opened, position
    if depth or b'"' in text[position : position + MOST_RECORD_BYTES]:
        return "open", opened if depth else position, len(text)
    return "end", len(text), len(text)


def split_objects(text: bytes, start: int = 0) -> list[tuple[int, int]]:
    """(begin, end) of each complete object of an array, from ``start`` in it, up to its end."""
    spans = []
    place, begin, end = next_object(text, start)
    while place == "object":
        spans.append((begin, end))
        place, begin, end = next_object(text, end)
    return spans


def record_starts(text: bytes, start: int, end: int | None = None) -> Iterator[int]:
    """Positions from ``start`` up to ``end`` where a record, or an object that looks like one, begins."""
    for found in _RECORD_START.finditer(text, start, len(text) if end is None else end):
        yield found.start()
