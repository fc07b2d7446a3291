"""What a report is made of, before it becomes HTML or Markdown: sections of tables, facts, figures and text.

Everything is plain text here; escaping is the renderers' (``html_page``, ``markdown``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from drivetrain.errors import DrivetrainError

__all__ = [
    "Block",
    "Bullets",
    "Cell",
    "Facts",
    "Figure",
    "Paragraph",
    "Preformatted",
    "Report",
    "Section",
    "Table",
    "Tile",
    "Tiles",
    "Tone",
    "section",
]

Tone = Literal["plain", "good", "doubtful", "bad", "muted"]


@dataclass(frozen=True)
class Cell:
    """One cell of a table. ``note`` is a second, smaller line."""

    text: str
    tone: Tone = "plain"
    note: str = ""
    code: bool = False
    """Something to be typed or looked up as it is: a leaf, a path, a hash."""
    whole: bool = False
    """Kept on one line, word by word where it is code."""


@dataclass(frozen=True)
class Table:
    """Rows under headings; ``numeric`` names the columns that are set flush right."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: frozenset[int] = frozenset()
    caption: str = ""
    folded: str = ""
    """Words behind which the table is hidden until it is asked for; empty: shown."""


@dataclass(frozen=True)
class Paragraph:
    """A line of text."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Bullets:
    """Short lines."""

    items: Sequence[Cell]


@dataclass(frozen=True)
class Facts:
    """Labels with what they are."""

    pairs: Sequence[tuple[str, Cell]]


@dataclass(frozen=True)
class Figure:
    """A picture, and the same in words for those who do not see it."""

    svg: str
    words: str
    """What Markdown shows instead; its lines are kept."""
    caption: str = ""


@dataclass(frozen=True)
class Preformatted:
    """Text as it is, hidden behind ``folded`` where that says something."""

    text: str
    folded: str = ""


@dataclass(frozen=True)
class Tile:
    """One of the figures that are looked at first."""

    label: str
    value: str
    note: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True)
class Tiles:
    """Tiles in a row."""

    tiles: Sequence[Tile]


Block = Table | Paragraph | Bullets | Facts | Figure | Preformatted | Tiles


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; a section without blocks is left out."""

    title: str
    blocks: Sequence[Block]


_DAMAGED = (DrivetrainError, OSError, AttributeError, LookupError, TypeError, ValueError, OverflowError)
"""What a document with a piece of another kind than it should have raises when it is read."""


def section(title: str, make: Callable[[], Sequence[Block]]) -> Section:
    """A section; one whose records are damaged says so, and does not take the report with it."""
    try:
        return Section(title, make())
    except _DAMAGED as error:
        words = str(error) if isinstance(error, DrivetrainError | OSError) else repr(error)
        return Section(title, [Paragraph(f"The records behind this section are damaged: {words}", "bad")])


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        kind: ``run`` or ``tune``, the word above the title.
        status: one word beside the title.
        subtitle: short facts below it.
    """

    kind: str
    title: str
    status: str
    tone: Tone
    subtitle: Sequence[str]
    sections: Sequence[Section]
    lead: Sequence[Block] = field(default_factory=tuple)
    """What stands above the first section."""
