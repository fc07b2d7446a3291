"""Lines for people: as they are in a pipe, broken at the width of a terminal, commands always whole."""

import pytest

from drivetrain.cli import terminal
from drivetrain.report.styled import Span, label_lines, line, plain


def rows_of(text: str, style: str = "", *, width: int = 60) -> list[str]:
    return [row.plain for row in terminal._broken((Span(text, style),), width)]


def test_a_long_line_of_a_table_goes_on_below_its_words() -> None:
    row = (
        f"  {'28.12':>9} {'-':>8} {'19.4%':>7}  data.loader: "
        + "the training thread waits for its batch " * 2
    )
    first, *rest = rows_of(row, width=80)
    assert first.startswith("      28.12")
    assert rest
    assert all(piece.startswith(" " * 31) for piece in rest)
    assert " ".join(" ".join([first, *rest]).split()) == " ".join(row.split())


def test_a_command_stays_whole_so_that_it_can_be_copied() -> None:
    command = "drivetrain tune " + "runs/a-long-name/" * 8 + " --only data_workers"
    assert rows_of(command, "command") == [command]


def test_without_a_terminal_lines_stay_whole_and_have_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    long = "word " * 60
    terminal.show_lines([line(long, "bad"), (Span("a", "bold"), Span("b", "#112233"))])
    assert capsys.readouterr().out.splitlines() == [long.rstrip(), "ab"]


def test_a_label_stands_beside_the_first_of_its_lines() -> None:
    text = plain(label_lines("Lost", "one two three four five six seven eight nine ten", width=40, indent=10))
    first, second = text.splitlines()
    assert first.startswith("Lost      one")
    assert second.startswith(" " * 10 + "s")
    assert max(map(len, (first, second))) <= 40
