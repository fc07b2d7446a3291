"""A report as Markdown: figures in words, tables in GitHub's notation. What comes from files cannot become markup."""

import re
from collections.abc import Iterator, Sequence

from drivetrain.report.blocks import (
    Block,
    Bullets,
    Cell,
    Facts,
    Figure,
    Paragraph,
    Preformatted,
    Report,
    Table,
    Tiles,
)
from drivetrain.report.svg import legal

__all__ = ["markdown"]

_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~!])")
_BLOCK_START = re.compile(r"^(\s*)([-+=]|\d+[.)])(?=\s|$)")


def markdown(report: Report) -> str:
    """The whole text."""
    lines = [f"# {_plain(report.title)}", ""]
    facts = " · ".join(map(_plain, report.subtitle))
    lines += [f"**{_plain(report.status)}**{' · ' if facts else ''}{facts}", ""]
    for block in report.lead:
        lines += [*_block(block), ""]
    for section in report.sections:
        if section.blocks:
            lines += [f"## {_plain(section.title)}", ""]
            for block in section.blocks:
                lines += [*_block(block), ""]
    return legal("\n".join(lines).rstrip() + "\n")


def _plain(content: str) -> str:
    """Text that no renderer takes for markup or for several lines."""
    one_line = " ".join(content.split())
    return _BLOCK_START.sub(r"\1\\\2", _MARKUP.sub(r"\\\1", one_line))


def _code(content: str) -> str:
    """A span of code, whose fence is longer than any run of backticks in it."""
    one_line = " ".join(content.split())
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", one_line)), default=0))
    room = " " if one_line.startswith("`") or one_line.endswith("`") else ""
    return f"{fence}{room}{one_line}{room}{fence}"


def _cell(cell: Cell) -> str:
    words = _code(cell.text) if cell.code and cell.text not in ("", "-") else _plain(cell.text)
    if cell.tone in ("bad", "doubtful") and not cell.code and cell.text:
        words = f"**{words}**"
    return words + (f" ({_plain(cell.note)})" if cell.note else "")


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Paragraph):
        yield f"**{_plain(block.text)}**" if block.tone == "bad" else _plain(block.text)
    elif isinstance(block, Bullets):
        for item in block.items:
            yield f"- {_cell(item)}"
    elif isinstance(block, Facts):
        for label, cell in block.pairs:
            yield f"- {_plain(label)}: {_cell(cell)}"
    elif isinstance(block, Tiles):
        for tile in block.tiles:
            note = f" ({_plain(tile.note)})" if tile.note else ""
            yield f"- {_plain(tile.label)}: **{_plain(tile.value)}**{note}"
    elif isinstance(block, Figure):
        yield from _fenced(block.words)
        if block.caption:
            yield ""
            yield _plain(block.caption)
    elif isinstance(block, Preformatted):
        if block.folded:
            yield _plain(block.folded)
            yield ""
        yield from _fenced(block.text)
    else:
        yield from _table(block)


def _fenced(content: str) -> Iterator[str]:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", content)), default=0))
    yield fence
    yield from content.rstrip("\n").split("\n")
    yield fence


def _table(table: Table) -> Iterator[str]:
    if table.caption or table.folded:
        yield _plain(table.caption or table.folded)
        yield ""
    yield _row([_plain(heading) for heading in table.headings])
    yield _row(["---:" if index in table.numeric else "---" for index in range(len(table.headings))])
    for row in table.rows:
        # Inside a table a bar ends the cell, even in a span of code.
        yield _row([re.sub(r"(?<!\\)\|", r"\\|", _cell(cell)) for cell in row])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
