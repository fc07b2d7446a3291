"""The events of a file, piece after piece, and the text around them.

A file is one document ``{…, "traceEvents": […], …}``, a bare list of events, or several of these one after
another. Text is cut where a boundary between records seems to be, and the piece decoded; that it decodes proves
the cut right, because a cut in a string or in a nested object leaves a quote or a bracket unpaired. A piece that
does not decode is split with the string-aware scanner and its records are read one by one.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from drivetrain.trace.kineto.records import Record
from drivetrain.trace.kineto.salvage import salvage
from drivetrain.trace.kineto.scanning import last_boundary, last_match, object_end, record_starts

__all__ = ["Document", "EventStream", "Piece"]

_BOM: Final = b"\xef\xbb\xbf"
_EVENTS_KEY: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENT_LIST: Final = re.compile(rb"\s*\[\s*(?=\{|\]|$)")
_ARRAY_END: Final = re.compile(rb"\}\s*\]")
_AFTER_ARRAY: Final = re.compile(rb'\s*(?:,\s*"|\}|\{|\[|\Z)')
_MOST_HEAD_BYTES: Final = 1 << 24
"""Without events in its first 16 MiB a file is taken for none of ours."""
_MOST_OPEN_BYTES: Final = 1 << 23
"""A record this long is a missing quote."""


@dataclass
class Document:
    """The text of one document around its events."""

    head: bytes = b""
    tail: bytes = b""


@dataclass
class Piece:
    """Consecutive records."""

    records: list[Record]
    document: int
    """Number of the document they are from."""
    first: int
    """Ordinal of the first one in the file."""
    offset: int
    """Where their text begins in the uncompressed file."""
    length: int


@dataclass
class EventStream:
    """Cuts blocks of text into pieces of records; see the module."""

    blocks: Iterator[bytes]
    found: Counter[str] = field(default_factory=Counter)
    """Rule id → how often it applied."""
    documents: list[Document] = field(default_factory=list)
    records: int = 0
    open_at: int | None = None
    """Offset of a record the file breaks off in."""
    arrays: int = 0
    """Events arrays found, empty ones too."""
    complete: bool = False
    """Whether the last events array was closed."""
    length: int = 0
    """Uncompressed bytes read."""

    def __post_init__(self) -> None:
        self._text = b""
        self._offset = 0
        self._ended = False
        self._hopeless_until = 0
        self._decoder = msgspec.json.Decoder(list[Record])

    def __iter__(self) -> Iterator[Piece]:
        self._more()
        if self._text.startswith(_BOM):
            self.found["byte_order_mark"] += 1
            self._drop(len(_BOM))
        while self._find_events():
            yield from self._pieces()
            self._read_tail()

    def _more(self) -> bool:
        block = next(self.blocks, b"")
        if not block:
            self._ended = True
            return False
        self.length += len(block)
        self._text += block
        return True

    def _drop(self, count: int) -> bytes:
        dropped, self._text = self._text[:count], self._text[count:]
        self._offset += count
        return dropped

    def _find_events(self) -> bool:
        """Move to the first event of the next document."""
        while not self._text.strip() and self._more():
            pass
        if not self._text.strip():
            return False
        while True:
            key = _EVENT_LIST.match(self._text) or _EVENTS_KEY.search(self._text)
            if key is not None or len(self._text) > _MOST_HEAD_BYTES or not self._more():
                break
        bare = next(record_starts(self._text, 0, key.start() if key else len(self._text)), None)
        if bare is not None:
            # The key, or the end of the document before, is damaged.
            self.found["damaged_header"] += 1
            self.documents.append(Document(head=self._drop(bare)))
        elif key is not None:
            head = self._drop(key.end())
            self.documents.append(Document(head=head[: key.start()]))
        else:
            if self.documents:
                self.found["trailing_bytes"] += 1
            self.documents.append(Document(head=self._drop(len(self._text))))
            return False
        if self.arrays:
            self.found["concatenated"] += 1
        self.arrays += 1
        return True

    def _pieces(self) -> Iterator[Piece]:
        self.complete = False
        while not self.complete:
            if self._ended or not self._more():
                yield from self._last_pieces()
                return
            boundary = last_boundary(self._text)
            if boundary is None:
                continue
            end, following = boundary
            records = self._decoded(end)
            if records is not None:
                yield self._piece(records, end)
                self._drop(following)
            else:
                yield from self._salvaged(end, following)

    def _decoded(self, end: int) -> list[Record] | None:
        text = self._text[:end]
        try:
            records = self._decoder.decode(b"[" + text + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError:
                self.found["invalid_utf8"] += 1
        return records

    def _piece(self, records: list[Record], length: int) -> Piece:
        piece = Piece(records, len(self.documents) - 1, self.records, self._offset, length)
        self.records += len(records)
        return piece

    def _salvaged(self, end: int, following: int) -> Iterator[Piece]:
        """Read the text up to ``end`` record by record; what is open there stays for the next piece."""
        result = salvage(self._text[:end], self.found, max(0, self._hopeless_until - self._offset))
        self._hopeless_until = self._offset + result.hopeless_until
        if result.records:
            yield self._piece(result.records, end)
        if result.closed_at is not None:
            after = result.closed_at + 1
            self.complete = self._closes(after)
            if not self.complete:
                self.found["stray_bracket"] += 1
            self._drop(after)
        elif result.open_at is None:
            self._drop(following)
        elif end - result.open_at > _MOST_OPEN_BYTES:
            self.found["lost_record"] += 1
            self._drop(following)
        else:
            self._drop(result.open_at)

    def _closes(self, position: int) -> bool:
        """Whether what follows a closing bracket is what may follow the events."""
        while len(self._text) - position < 64 and self._more():
            pass
        return _AFTER_ARRAY.match(self._text, position) is not None

    def _last_pieces(self) -> Iterator[Piece]:
        """All that is left: the last events, the end of their array, and what follows."""
        final = last_match(_ARRAY_END, self._text)
        if final is not None:
            records = self._decoded(final.start() + 1)
            if records is not None:
                yield self._piece(records, final.start() + 1)
                self._drop(final.end())
                self.complete = True
                return
        open_at = self._offset + len(self._text) if self._text.rstrip()[-1:] == b"," else None
        while not self.complete and self._text:
            before = len(self._text)
            yield from self._salvaged(before, before)
            if len(self._text) == before:
                open_at = self._offset
                self._drop(before)
        if not self.complete:
            self.open_at = open_at

    def _read_tail(self) -> None:
        """The rest of a document, behind its events. A bare list has none."""
        if not self.complete or not self.documents[-1].head:
            return
        while True:
            end = object_end(self._text, 0, depth=1)
            if end is None and (len(self._text) > _MOST_HEAD_BYTES or not self._more()):
                # What older exporters write last is lost: the base of the clock.
                end = len(self._text)
                self.open_at = self._offset + end
            if end is not None:
                break
        self.documents[-1].tail = self._drop(end)
