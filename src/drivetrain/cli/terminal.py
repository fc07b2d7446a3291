"""Lines with styles on stdout: coloured and broken at its width on a terminal, as they are in a pipe or a file."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from drivetrain.report.styled import Line

__all__ = ["columns", "show_lines"]

_PLAIN_COLUMNS = 80
_FEWEST, _MOST = 60, 120
_STYLES = {
    "good": "green",
    "bad": "bold red",
    "doubtful": "yellow",
    "command": "bold cyan",
}
_COLUMN_OF_TEXT = 31
"""Where the words of a table of losses begin: what is broken goes on there."""


def columns() -> int:
    """Columns to lay lines out for: the terminal's within reason, 80 where there is none."""
    if not sys.stdout.isatty():
        return _PLAIN_COLUMNS
    import shutil

    return min(max(shutil.get_terminal_size().columns, _FEWEST), _MOST)


def show_lines(lines: "Sequence[Line]") -> None:
    """Print them. Without a terminal each line stays whole: whoever searches a file for words finds them."""
    if not sys.stdout.isatty():
        from drivetrain.report.styled import plain

        print(plain(lines))
        return
    from rich.console import Console

    width = columns()
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for one in lines:
        for row in _broken(one, width):
            console.print(row)


def _broken(one: "Line", width: int) -> "list[Text]":
    """A line as rows of the terminal; one that is too long goes on below its words. A command stays whole, so that it
    can be copied."""
    import textwrap

    from rich.text import Text

    whole = "".join(span.text for span in one)
    if len(whole) <= width or any(span.style == "command" for span in one):
        return [Text.assemble(*((span.text, _STYLES.get(span.style, span.style)) for span in one))]
    indent = len(whole) - len(whole.lstrip())
    if len(one) == 1 and whole[:_COLUMN_OF_TEXT].strip() and whole[:_COLUMN_OF_TEXT].strip()[0].isdigit():
        indent = min(_COLUMN_OF_TEXT, width // 2)
    style = _STYLES.get(one[0].style, one[0].style) if one else ""
    pieces = textwrap.wrap(
        whole,
        width,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    return [Text(piece, style) for piece in pieces]
