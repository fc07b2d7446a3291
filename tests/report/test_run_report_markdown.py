"""Markdown of a report: what comes from files stays text, and every table keeps its columns."""

import math
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from drivetrain.archive.reader import open_run
from drivetrain.report.blocks import (
    Bullets,
    Cell,
    Facts,
    Figure,
    Paragraph,
    Preformatted,
    Report,
    Section,
    Table,
)
from drivetrain.report.markdown import markdown
from drivetrain.report.run_records import read_records
from drivetrain.report.run_report import run_report
from report_samples import finished_run


def report(*blocks: object, title: str = "title") -> Report:
    return Report("run", title, "finished", "good", ["a fact"], [Section("S", blocks)])  # type: ignore[arg-type]


def columns(line: str) -> int:
    return len(re.findall(r"(?<!\\)\|", line)) - 1


@given(st.text(max_size=40), st.booleans())
def test_no_content_of_a_cell_adds_a_column_or_a_row(content: str, code: bool) -> None:
    table = Table(["a", "b"], [[Cell(content, code=code), Cell("x", note=content)]])
    lines = markdown(report(table)).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 3
    assert {columns(row) for row in rows} == {2}


@given(st.text(max_size=60))
def test_a_line_of_text_stays_one_line_and_is_no_heading_list_or_quote(content: str) -> None:
    lines = markdown(report(Paragraph(content), title=content)).splitlines()
    assert sum(line.startswith("#") for line in lines) == 2
    assert not [line for line in lines if re.match(r"\s*([-+*>]|\d+[.)])(\s|$)", line)]


@given(st.text(alphabet="`\nab", max_size=40))
def test_a_block_of_text_ends_where_it_ends(content: str) -> None:
    made = markdown(report(Preformatted(content), Paragraph("after")))
    fence = next(line for line in made.splitlines() if line.startswith("```"))
    inside = made.split(f"{fence}\n", 1)[1]
    assert inside.count(f"\n{fence}\n") + inside.startswith(f"{fence}\n") == 1
    assert made.endswith("after\n")


def test_figures_are_in_words_and_facts_are_lines() -> None:
    made = markdown(
        report(
            Figure("<svg/>", "loss: 2.5 at step 1", "a caption"),
            Facts([("seed", Cell("1234"))]),
            Bullets([Cell("bad news", "bad")]),
        )
    )
    assert "```\nloss: 2.5 at step 1\n```" in made
    assert "a caption" in made
    assert "- seed: 1234" in made
    assert "- **bad news**" in made
    assert "<svg" not in made


def test_the_markdown_of_a_run_has_the_same_figures_as_its_page(tmp_path: Path) -> None:
    made = markdown(run_report(read_records(open_run(finished_run(tmp_path)))))
    for words in ("13,653", "300.0 ms", "25.8%", "1.50 GB", "data.loader", "MFU points"):
        assert words in made, words
    spike = 10 + 0.5 * math.cos(17)
    assert f"greatest {spike:.4f} at step 17" in made
    assert "| data\\_workers |" in made or "**data\\_workers**" in made
