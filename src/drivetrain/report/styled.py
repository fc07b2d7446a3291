"""Text for a terminal as lines of spans with a style: coloured where somebody looks, plain in a pipe or a file."""

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Line", "Span", "label_lines", "line", "plain"]


@dataclass(frozen=True)
class Span:
    """A piece of a line. ``style``: ``bold``, ``dim``, ``good``, ``bad``, ``doubtful``, ``command``, a colour as
    ``#rrggbb``, or nothing."""

    text: str
    style: str = ""


Line = tuple[Span, ...]


def line(text: str, style: str = "") -> Line:
    """A line of one span."""
    return (Span(text, style),)


def plain(lines: Iterable[Line]) -> str:
    """Without styles."""
    return "\n".join("".join(span.text for span in one).rstrip() for one in lines)


def label_lines(label: str, text: str, *, width: int, indent: int, style: str = "") -> Iterator[Line]:
    """A label, and beside it text that is broken at ``width`` columns; a word longer than that stays whole."""
    pieces = textwrap.wrap(text, max(width - indent, 20), break_long_words=False, break_on_hyphens=False) or [
        ""
    ]
    for index, piece in enumerate(pieces):
        yield (Span(f"{label if index == 0 else '':<{indent}}", "bold"), Span(piece, style))
