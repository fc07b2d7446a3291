"""Records out of text that does not decode: repair what has a rule, drop what has none, find the next one.

Each repair is counted under the id of its rule (:mod:`drivetrain.trace.kineto.rules`).
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec

from drivetrain.trace.kineto.records import Record, is_record, record_of
from drivetrain.trace.kineto.scanning import next_object, object_end, record_starts

__all__ = ["Salvaged", "arguments_of", "read_one", "repaired", "salvage"]

_CONTROL: Final = re.compile(rb"[\x00-\x1f]")
_ESCAPE: Final = re.compile(
    rb'\\(["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})?'
)
_WORD: Final = re.compile(
    rb'("(?:[^"\\]|\\.)*+")|([-+]?\b(?:nan|inf|infinity|n/a|none|undefined)\b(?:\([a-z]*\))?)',
    re.IGNORECASE | re.DOTALL,
)
_DECODER: Final = msgspec.json.Decoder(Record)
_MOST_CANDIDATE_BYTES: Final = 1 << 14
"""Longest record looked for behind a damaged one."""
_MOST_CONTROL: Final = b"\n\r\t"


class Salvaged:
    """What :func:`salvage` made of a piece of text."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.spans: list[tuple[int, int]] = []
        """Where each record is in the text."""
        self.open_at: int | None = None
        """Where an incomplete record at the end begins."""
        self.hopeless_until = 0
        """Up to here no whole record begins behind the ones that were read."""
        self.closed_at: int | None = None
        """Where the bracket that ends the events is."""


def _without_control(text: bytes) -> bytes:
    # Between members a line break is a space as well, so no string has to be recognised.
    return _CONTROL.sub(b" ", text)


def _with_escapes(text: bytes) -> bytes:
    return _ESCAPE.sub(lambda found: found[0] if found[1] is not None else b"\\\\", text)


def _with_null(text: bytes) -> bytes:
    return _WORD.sub(lambda found: found[1] if found[1] is not None else b"null", text)


def _as_utf8(text: bytes) -> bytes:
    return text.decode("utf-8", "replace").encode()


_REPAIRS: Final[tuple[tuple[str, Callable[[bytes], bytes]], ...]] = (
    ("invalid_utf8", _as_utf8),
    ("bad_escape", _with_escapes),
    ("not_a_number", _with_null),
    ("control_character", _without_control),
)


def repaired(text: bytes, found: Counter[str]) -> bytes:
    """The text of one object with every rule applied that has something to do in it."""
    for rule, repair in _REPAIRS:
        better = repair(text)
        if better == text:
            continue
        if rule != "control_character" or _CONTROL.search(text.translate(None, _MOST_CONTROL)):
            found[rule] += 1
        text = better
    return text


def _typed(text: bytes) -> Record | None:
    try:
        return _DECODER.decode(text)
    except msgspec.ValidationError:
        # Well formed, but a member is of another type than any exporter writes, or a number is out of range.
        try:
            return record_of(msgspec.json.decode(text))
        except msgspec.DecodeError:
            return None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_one(text: bytes, found: Counter[str]) -> Record | None:
    """One record, repaired if need be; None if nothing helps."""
    record = _typed(text)
    if record is None:
        trial: Counter[str] = Counter()
        record = _typed(repaired(text, trial))
        if record is not None:
            found.update(trial)
    return record


def arguments_of(text: bytes) -> dict[str, Any]:
    """All of a record's arguments; empty where they cannot be read."""
    for mended in (False, True):
        try:
            document = msgspec.json.decode(repaired(text, Counter()) if mended else text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        arguments = document.get("args") if isinstance(document, dict) else None
        return arguments if isinstance(arguments, dict) else {}
    return {}


def _next_record(text: bytes, start: int) -> int | None:
    """Where from ``start`` the next record begins that is whole and reads; None: nowhere."""
    for position in record_starts(text, start):
        # Bounded, as each candidate with a quote missing would be scanned to the end of the text.
        end = object_end(text, position, limit=_MOST_CANDIDATE_BYTES)
        if end is not None:
            record = read_one(text[position:end], Counter())
            if record is not None and is_record(record):
                return position
    return None


def salvage(text: bytes, found: Counter[str], hopeless_until: int = 0) -> Salvaged:
    """The records of a piece of an events array that does not decode as a whole.

    Args:
        text: from between two records.
        found: rule id → count, added to. ``lost_record`` counts what could not be read.
        hopeless_until: where an earlier call found that no record begins before. Without it, text that is
            garbage would be searched again behind every damaged record.
    """
    result = Salvaged()
    result.hopeless_until = hopeless_until
    start = 0
    while True:
        place, begin, end = next_object(text, start)
        if place == "closed":
            result.closed_at = begin
            return result
        if place == "end":
            return result
        record = read_one(text[begin:end], found) if place == "object" else None
        if record is not None:
            result.records.append(record)
            result.spans.append((begin, end))
            start = end
            continue
        # A quote or a bracket is missing: what was taken for one object may hold several.
        following = _next_record(text, max(begin + 1, result.hopeless_until))
        if following is None:
            result.hopeless_until = max(result.hopeless_until, len(text) - _MOST_CANDIDATE_BYTES)
            if place == "open":
                # The record goes on in the next piece, or the file ends in it.
                result.open_at = begin
                return result
        start = end if following is None else following
        found["lost_record"] += 1
