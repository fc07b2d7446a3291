"""A report as one HTML file: inline SVG, no JavaScript, nothing fetched; also well-formed XML.

Follows the reader's light or dark screen, a narrow one, and paper.
"""

import re
from collections.abc import Iterator, Sequence
from html import escape

from drivetrain.report.blocks import (
    Block,
    Bullets,
    Cell,
    Facts,
    Figure,
    Paragraph,
    Preformatted,
    Report,
    Section,
    Table,
    Tiles,
)
from drivetrain.report.page_style import STYLE
from drivetrain.report.svg import legal

__all__ = ["html_page"]

_LONGEST_WORD = 44
"""Longer words may be broken, so that one of them does not push a table off the page."""


def html_page(report: Report) -> str:
    """The whole page."""
    sections = [section for section in report.sections if section.blocks]
    title = f"{report.title} - {report.kind} report"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        '<meta name="color-scheme" content="light dark"/>',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f'<header><p class="kind">Drivetrain {escape(report.kind)} report</p>',
        f"<h1>{_breakable(report.title)} "
        f'<span class="badge {report.tone}">{escape(report.status)}</span></h1>',
        f'<p class="subtitle">{" <span>·</span> ".join(escape(fact) for fact in report.subtitle)}</p></header>',
        "<main>",
        *(_block(block) for block in report.lead),
        f"<nav>{''.join(_link(section) for section in sections)}</nav>",
    ]
    for section in sections:
        parts.append(f'<section id="{_identifier(section)}"><h2>{escape(section.title)}</h2>')
        parts.extend(_block(block) for block in section.blocks)
        parts.append("</section>")
    parts.append("</main></body></html>")
    return legal("\n".join(parts) + "\n")


def _identifier(section: Section) -> str:
    return re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")


def _link(section: Section) -> str:
    return f'<a href="#{_identifier(section)}">{escape(section.title)}</a>'


def _breakable(content: str) -> str:
    """Escaped, with leave to break a long name after its separators."""
    return re.sub(r"([-_./=,])", r"\1<wbr/>", escape(content, quote=False))


def _block(block: Block) -> str:
    if isinstance(block, Paragraph):
        return f'<p class="{block.tone}">{escape(block.text)}</p>'
    if isinstance(block, Bullets):
        items = "".join(f'<li class="{item.tone}">{_content(item)}</li>' for item in block.items)
        return f"<ul>{items}</ul>"
    if isinstance(block, Facts):
        pairs = "".join(
            f'<dt>{escape(label)}</dt><dd class="{cell.tone}">{_content(cell)}</dd>'
            for label, cell in block.pairs
        )
        return f"<dl>{pairs}</dl>"
    if isinstance(block, Figure):
        caption = f"<figcaption>{escape(block.caption)}</figcaption>" if block.caption else ""
        return f'<figure><div class="scroll">{block.svg}</div>{caption}</figure>'
    if isinstance(block, Preformatted):
        return _folded(f"<pre>{escape(block.text)}</pre>", block.folded)
    if isinstance(block, Tiles):
        return f'<div class="tiles">{"".join(_tiles(block))}</div>'
    return _folded(_table(block), block.folded)


def _folded(content: str, words: str) -> str:
    return f"<details><summary>{escape(words)}</summary>{content}</details>" if words else content


def _content(cell: Cell) -> str:
    shown = escape(cell.text)
    if cell.whole and max(map(len, cell.text.split(" "))) <= _LONGEST_WORD:
        tag = "code" if cell.code and cell.text != "-" else "span"
        words = cell.text.split(" ") if cell.code else [cell.text]
        shown = " ".join(f'<{tag} class="whole">{escape(word)}</{tag}>' for word in words)
    elif cell.code and cell.text != "-":
        shown = f"<code>{_breakable(cell.text)}</code>"
    return shown + (f'<span class="note">{escape(cell.note)}</span>' if cell.note else "")


def _tiles(block: Tiles) -> Iterator[str]:
    for tile in block.tiles:
        yield (
            f'<div class="tile"><div class="label">{escape(tile.label)}</div>'
            f'<div class="value">{escape(tile.value)}</div>'
            f'<div class="delta {tile.tone}">{escape(tile.note) or "&#160;"}</div></div>'
        )


def _table(table: Table) -> str:
    def cells(row: Sequence[Cell]) -> str:
        # On a narrow screen each row is a card, and its cells say which column they are of.
        return "".join(
            f'<td class="{cell.tone}{" number" if index in table.numeric else ""}{"" if cell.text else " empty"}" '
            f'data-label="{escape(table.headings[index])}"><div>{_content(cell)}</div></td>'
            for index, cell in enumerate(row)
        )

    head = "".join(
        f'<th class="{"number" if index in table.numeric else "text"}">{escape(heading)}</th>'
        for index, heading in enumerate(table.headings)
    )
    body = "".join(f"<tr>{cells(row)}</tr>" for row in table.rows)
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    return f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
