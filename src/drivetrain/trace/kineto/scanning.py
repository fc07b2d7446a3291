"""Find where events begin and end in JSON text, knowing about strings, not about layout.

Works on bytes, so that text which is no UTF-8 or holds control characters is scanned like any other. Two
exporters lay the same records out differently (several lines a record, or one), and both changed over the years:
nothing here looks at line breaks.
"""

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["Split", "last_boundary", "last_match", "object_end", "record_starts", "split_objects"]

_BRACKET: Final = re.compile(rb'[^"{}\[\]]*+(?:"(?:[^"\\]|\\.)*+"[^"{}\[\]]*+)*+([{}\[\]])', re.DOTALL)
"""Up to and with the next bracket outside strings. Possessive: text that cannot match fails in linear time."""

_BOUNDARY: Final = re.compile(rb"\}\s*,\s*(?=\{)")
"""Between two objects of one array, if it is outside a string and at the right depth."""

_RECORD_START: Final = re.compile(
    rb'\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id|bp|s|args)"\s*:',
)
"""What a record can begin with. Never inside a string, where the quotes would be escaped."""

_WINDOWS: Final = (1 << 12, 1 << 16)
"""How far back from the end to look for a boundary, before all of the text."""


def last_match(pattern: re.Pattern[bytes], text: bytes, start: int = 0) -> re.Match[bytes] | None:
    """The last match of a pattern from ``start``."""
    matches = deque(pattern.finditer(text, start), maxlen=1)
    return matches[0] if matches else None


@dataclass(frozen=True)
class Split:
    """What :func:`split_objects` found."""

    spans: list[tuple[int, int]]
    """(start, end) of each complete object."""
    open_at: int | None
    """Where the last, incomplete object begins; None: the text ends between objects."""
    closed_at: int | None
    """Where the bracket that ends the array is; None: not in this text."""


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


def object_end(text: bytes, start: int, depth: int = 0) -> int | None:
    """End of the object that begins at ``start``, or that is open there ``depth`` brackets deep.

    None if the text ends before it.
    """
    position = start
    while (found := _BRACKET.match(text, position)) is not None:
        position = found.end()
        depth += 1 if found[1] in b"{[" else -1
        if depth <= 0:
            return position
    return None


def split_objects(text: bytes, start: int = 0) -> Split:
    """The objects of an array, from ``start``, which is inside the array and between two objects."""
    spans = []
    depth = 0
    opened = start
    position = start
    while (found := _BRACKET.match(text, position)) is not None:
        position = found.end()
        bracket = found[1]
        if bracket in b"{[":
            if depth == 0:
                opened = position - 1
            depth += 1
            continue
        if depth == 0:
            if bracket == b"]":
                return Split(spans, None, position - 1)
            continue  # a brace that closes nothing
        depth -= 1
        if depth == 0 and bracket == b"}":
            spans.append((opened, position))
    incomplete = depth > 0 or b'"' in text[position:]
    return Split(spans, (opened if depth else position) if incomplete else None, None)


def record_starts(text: bytes, start: int) -> Iterator[int]:
    """Positions from ``start`` where a record, or an object that looks like one, begins."""
    for found in _RECORD_START.finditer(text, start):
        yield found.start()
