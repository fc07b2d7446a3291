"""The little of SVG that the figures need: escaped text and rounded numbers.

Neutral colours (ink, muted text, grid, paper) also carry a class of that name, so that a page can turn them for a
dark screen; a figure that stands alone keeps the light ones.
"""

import re
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

__all__ = [
    "FONT",
    "GRID",
    "INK",
    "MUTED",
    "PAPER",
    "circle",
    "document",
    "legal",
    "legend",
    "line",
    "number",
    "path",
    "polyline",
    "rectangle",
    "text",
    "width_of",
]

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, MUTED, GRID, PAPER = "#222", "#555", "#bbbbbb", "#ffffff"

_CLASSES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper", "#444444": "unexplained"}
# Thin lines need more contrast on a dark screen than areas do.
_LINE_CLASSES = {**_CLASSES, "#0072b2": "strong", "#7fb3d5": "faint", "#009e73": "green"}
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def legal(content: str) -> str:
    """Without the characters that no XML may hold, not even escaped: controls and bytes of a file's name."""
    return _ILLEGAL.sub("\ufffd", content)


def number(value: float) -> str:
    """A coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _class(colour: str, of_stroke: bool = False) -> str:
    name = (_LINE_CLASSES if of_stroke else _CLASSES).get(colour)
    if name is None:
        return ""
    return f' class="{name}-line"' if of_stroke else f' class="{name}"'


def _tip(title: str) -> str:
    return f"<title>{escape(title)}</title>" if title else ""


def rectangle(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    """A filled rectangle; ``title`` is what a pointer resting on it shows and a screen reader says."""
    return (
        f'<rect x="{number(x)}" y="{number(y)}" width="{number(max(width, 0))}" height="{number(height)}" '
        f"fill={quoteattr(fill)}{_class(fill)}>{_tip(title)}</rect>"
    )


def circle(x: float, y: float, radius: float, fill: str, title: str = "") -> str:
    """A filled disc with a rim in the colour of the paper, so that it stands out on a line."""
    return (
        f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" fill={quoteattr(fill)} '
        f'stroke="{PAPER}" stroke-width="1.5" class="paper-line">{_tip(title)}</circle>'
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, *, width: float = 1, dash: str = "") -> str:
    """A straight line."""
    dashes = f" stroke-dasharray={quoteattr(dash)}" if dash else ""
    return (
        f'<line x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" '
        f'stroke={quoteattr(stroke)} stroke-width="{number(width)}"{dashes}{_class(stroke, True)}/>'
    )


def polyline(
    points: Iterable[tuple[float, float]], stroke: str, *, width: float = 1.5, dash: str = ""
) -> str:
    """A line through ``points``."""
    dashes = f" stroke-dasharray={quoteattr(dash)}" if dash else ""
    places = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return (
        f'<polyline points="{places}" fill="none" stroke={quoteattr(stroke)} stroke-width="{number(width)}" '
        f'stroke-linejoin="round" stroke-linecap="round"{dashes}{_class(stroke, True)}/>'
    )


def path(outline: str, fill: str, title: str = "") -> str:
    """A filled outline; ``outline`` is in the commands of SVG paths and comes from this package alone."""
    return f'<path d="{outline}" fill={quoteattr(fill)}{_class(fill)}>{_tip(title)}</path>'


def text(
    x: float,
    y: float,
    content: str,
    *,
    anchor: str = "start",
    size: int = 12,
    fill: str = INK,
    weight: str = "",
) -> str:
    """A line of text with its baseline at ``y``."""
    bold = f" font-weight={quoteattr(weight)}" if weight else ""
    return (
        f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" font-size="{size}"{bold} '
        f"fill={quoteattr(fill)}{_class(fill)}>{escape(content)}</text>"
    )


def width_of(content: str, size: int) -> float:
    """About how wide a line of text is: a little more than most fonts need, since nobody knows which one is there."""
    return 0.6 * size * len(content)


def legend(
    entries: Sequence[tuple[str, str]], x: float, y: float, right: float, *, size: int = 11
) -> tuple[list[str], float]:
    """A square and its word for each (colour, word), in as many rows as fit between ``x`` and ``right``.

    Returns:
        The elements, and how far below ``y`` the last row ends.
    """
    elements, place, row = [], x, 0
    for colour, words in entries:
        needed = 16 + width_of(words, size)
        if place > x and place + needed > right:
            place, row = x, row + 1
        elements.append(rectangle(place, y + 18 * row, 12, 12, colour))
        elements.append(text(place + 16, y + 18 * row + 11, words, size=size))
        place += needed + 16
    return elements, 18 * (row + 1)


def document(width: float, height: float, label: str, elements: list[str]) -> str:
    """A standalone SVG; ``label`` says in words what the figure shows."""
    body = "\n".join(elements)
    return legal(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(width)} {number(height)}" '
        f'width="{number(width)}" height="{number(height)}" role="img" aria-label={quoteattr(label)} '
        f"font-family={quoteattr(FONT)}>\n"
        f'<rect width="100%" height="100%" fill="{PAPER}" class="paper"/>\n{body}\n</svg>\n'
    )
