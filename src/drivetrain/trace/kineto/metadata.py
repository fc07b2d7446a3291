"""What a trace says beside its events: the job, the rank, the devices, the base of its clock."""

import ast
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from drivetrain.trace.kineto.salvage import repaired
from drivetrain.trace.kineto.stream import Document

__all__ = ["base_of", "metadata_of", "rank_of", "world_size_of"]

_MEMBER: Final = re.compile(
    rb'"(baseTimeNanoseconds|schemaVersion|trace_id|traceName|distributedInfo)"\s*:\s*'
)
_TEXT_MAPPINGS: Final = ("distributedInfo",)
"""Members that files rewritten by other tools carry as Python's text of a dictionary."""
_RANK_IN_NAME: Final = (
    re.compile(r"(?:^|[^a-z])rank[-_. ]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:^|[^a-z])worker[-_. ]?(\d+)(?!\d)", re.IGNORECASE),
)
_MOST_RANK: Final = 10_000_000
_DEEPEST: Final = 32
_LEFT_OUT: Final = object()
"""Stands for a value that is left out."""


def metadata_of(document: Document, found: Counter[str]) -> dict[str, Any]:
    """Members of a document around its events. ``damaged_metadata`` is counted where not all could be read."""
    metadata: dict[str, Any] = {}
    head = document.head.rstrip().rstrip(b",")
    tail = document.tail.strip().lstrip(b",")
    for text in (head + b"}" if head else b"", b"{" + tail if tail else b""):
        if not text.strip(b"{}\x00 \t\r\n"):
            continue
        metadata |= _members(text, found)
    for key in _TEXT_MAPPINGS:
        if isinstance(metadata.get(key), str):
            metadata[key] = _mapping(metadata[key])
    plain: dict[str, Any] = _plain(metadata, found)
    return plain


def _plain(value: Any, found: Counter[str], depth: int = 0) -> Any:
    """A value as JSON can hold it again: no integer beyond 64 bits, no half of a surrogate pair, no deep nest."""
    if isinstance(value, dict | list | tuple) and depth >= _DEEPEST:
        found["damaged_metadata"] += 1
        return _LEFT_OUT
    if isinstance(value, dict):
        plain = {str(key): _plain(item, found, depth + 1) for key, item in value.items()}
        return {_text(key): item for key, item in plain.items() if item is not _LEFT_OUT}
    if isinstance(value, list | tuple):
        items = [_plain(item, found, depth + 1) for item in value]
        return [item for item in items if item is not _LEFT_OUT]
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        found["integer_overflow"] += 1
        return _LEFT_OUT
    if value is None or isinstance(value, bool | int | float):
        return value
    found["damaged_metadata"] += 1
    return _LEFT_OUT


def _text(text: str) -> str:
    return text.encode(errors="replace").decode()


def _members(text: bytes, found: Counter[str]) -> dict[str, Any]:
    repairs: Counter[str] = Counter()
    for candidate, applied in ((text, None), (repaired(text, repairs), repairs)):
        try:
            members = msgspec.json.decode(candidate)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(members, dict):
            found.update(applied)
            return members
    found["damaged_metadata"] += 1
    return _important_members(text)


def _important_members(text: bytes) -> dict[str, Any]:
    """The members the numbers depend on, one by one."""
    members: dict[str, Any] = {}
    for key in _MEMBER.finditer(text):
        for end in (
            found.end() for found in re.finditer(rb"[\d\}\"](?=\s*[,}])", text[key.end() : key.end() + 65536])
        ):
            try:
                members[key[1].decode()] = msgspec.json.decode(text[key.end() : key.end() + end])
                break
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
    return members


def _mapping(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def base_of(metadata: Mapping[str, Any]) -> int:
    """Nanoseconds to add to every time of the document."""
    value = metadata.get("baseTimeNanoseconds", 0)
    if isinstance(value, str) and re.fullmatch(r"\d{1,19}", value):
        value = int(value)
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        return 0
    return value


def _whole(value: object) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"\d{1,7}", value):
        value = int(value)
    return value if isinstance(value, int) and 0 <= value < _MOST_RANK else None


def _distributed(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    information = metadata.get("distributedInfo")
    return information if isinstance(information, dict) else {}


def rank_of(metadata: Mapping[str, Any], path: Path) -> int | None:
    """The rank the file names, else the one its name does (``rank3``, ``worker3``), else None."""
    rank = _whole(_distributed(metadata).get("rank"))
    if rank is not None:
        return rank
    for pattern in _RANK_IN_NAME:
        in_name = pattern.search(path.name)
        if in_name is not None:
            return _whole(in_name[1])
    return None


def world_size_of(metadata: Mapping[str, Any]) -> int | None:
    """Number of ranks of the job, where the file says it."""
    size = _whole(_distributed(metadata).get("world_size"))
    return size if size else None
