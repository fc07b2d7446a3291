"""The little of SVG that the figures need: escaped text and rounded numbers."""

import re
from xml.sax.saxutils import escape, quoteattr

__all__ = ["document", "legal", "number", "rectangle", "text"]

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"

_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def legal(content: str) -> str:
    """Without the characters that no XML may hold, not even escaped: controls and bytes of a file's name."""
    return _ILLEGAL.sub("\ufffd", content)


def number(value: float) -> str:
    """A coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def rectangle(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    """A filled rectangle; ``title`` is what a pointer resting on it shows and a screen reader says."""
    tip = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{number(x)}" y="{number(y)}" width="{number(max(width, 0))}" height="{number(height)}" '
        f"fill={quoteattr(fill)}>{tip}</rect>"
    )


def text(
    x: float, y: float, content: str, *, anchor: str = "start", size: int = 12, fill: str = "#222"
) -> str:
    """A line of text with its baseline at ``y``."""
    return (
        f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" font-size="{size}" '
        f"fill={quoteattr(fill)}>{escape(content)}</text>"
    )


def document(width: float, height: float, label: str, elements: list[str]) -> str:
    """A standalone SVG; ``label`` says in words what the figure shows."""
    body = "\n".join(elements)
    return legal(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(width)} {number(height)}" '
        f'width="{number(width)}" height="{number(height)}" role="img" aria-label={quoteattr(label)} '
        f"font-family={quoteattr(FONT)}>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )
