"""Append-only JSON lines: killed at any byte, a full disk, a reader beside the writer."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.archive.lines import LineWriter, read_first, read_lines, read_tail
from drivetrain.errors import EnvironmentFault, RunError

WORDS = st.text().filter(lambda word: word not in ("NaN", "Infinity", "-Infinity"))
FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | FINITE | WORDS
LINES = st.lists(st.dictionaries(st.text(), VALUES | st.lists(VALUES, max_size=3), max_size=5), max_size=6)


def write_all(path: Path, lines: list[dict[str, Any]]) -> None:
    path.unlink(missing_ok=True)
    writer = LineWriter(path)
    for line in lines:
        writer.write(line)
    writer.close()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines") / "lines.jsonl"


@settings(deadline=None)
@given(lines=LINES, data=st.data())
def test_a_file_cut_at_any_byte_gives_its_whole_lines(
    scratch: Path, lines: list[dict[str, Any]], data: st.DataObject
) -> None:
    write_all(scratch, lines)
    content = scratch.read_bytes()
    kept = content[: data.draw(st.integers(0, len(content)))]
    scratch.write_bytes(kept)
    expected = lines[: kept.count(b"\n")]
    assert read_lines(scratch) == expected
    assert read_tail(scratch) == expected
    assert read_first(scratch) == (expected[0] if expected else None)


@settings(deadline=None, max_examples=30)  # Each torn file costs a wait of 50 ms.
@given(lines=LINES, data=st.data())
def test_a_writer_that_continues_a_cut_file_joins_nothing_to_the_torn_line(
    scratch: Path, lines: list[dict[str, Any]], data: st.DataObject
) -> None:
    write_all(scratch, [{"n": index} for index, _ in enumerate(lines)])
    content = scratch.read_bytes()
    kept = content[: data.draw(st.integers(0, len(content)))]
    scratch.write_bytes(kept)
    writer = LineWriter(scratch)
    writer.write({"n": "new"})
    writer.close()
    assert read_lines(scratch) == [{"n": index} for index in range(kept.count(b"\n"))] + [{"n": "new"}]


def test_zeros_that_a_power_cut_left_at_the_end_are_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for tail in (bytes(5000), bytes(70_000), b'{"n": ' + bytes(3) + b"\n"):
        path.write_bytes(b'{"n":1}\n' + tail)
        assert read_lines(path) == [{"n": 1}]
        LineWriter(path).close()
        assert path.read_bytes() == b'{"n":1}\n'


@pytest.mark.parametrize("damage", [b'{"n":2', b"", b"\x00\x00", b"[2]", b"2"])
def test_a_damaged_line_in_the_middle_is_an_error_that_names_file_and_line(
    tmp_path: Path, damage: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"n":1}\n' + damage + b'\n{"n":3}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged at line 2"):
        read_lines(path)


def test_the_tail_starts_at_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_all(path, [{"step": step} for step in range(1000)])
    for size in range(20, 60):
        tail = read_tail(path, max_bytes=size)
        assert tail
        assert [line["step"] for line in tail] == list(range(1000 - len(tail), 1000))


def test_a_file_that_does_not_exist_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none") == []
    assert read_tail(tmp_path / "none") == []
    assert read_first(tmp_path / "none") is None


def test_a_reader_beside_the_writer_sees_a_growing_prefix(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    count, padding = 3000, "x" * 3000  # Lines that cross pages.
    writer = LineWriter(path)

    def write() -> None:
        for step in range(count):
            writer.write({"step": step, "padding": padding})

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    while thread.is_alive():
        lines = read_lines(path)
        assert [line["step"] for line in lines] == list(range(len(lines)))
        assert len(lines) >= seen
        seen = len(lines)
        read_tail(path)
    thread.join()
    writer.close()
    assert len(read_lines(path)) == count


FULL_DISK = """
import resource, sys
from pathlib import Path
from drivetrain.archive.lines import LineWriter
said = []
writer = LineWriter(Path(sys.argv[1]), on_fault=said.append)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
line = {"padding": "x" * 100}
for step in range(5):
    writer.write({"step": step} | line)
room = Path(sys.argv[1]).stat().st_size + 50  # The next line fits in part.
resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
for step in range(5, 8):
    writer.write({"step": step} | line)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
for step in range(8, 10):
    writer.write({"step": step} | line)
print(writer.lost, len(said))
print(said[0])
"""


def test_lines_that_find_no_room_are_counted_and_the_rest_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True
    )
    counts, message = done.stdout.splitlines()
    assert counts == "3 1"
    assert message.startswith(f"cannot write {path}: File too large; the line is lost")
    assert [line["step"] for line in read_lines(path)] == [0, 1, 2, 3, 4, 8, 9]


def test_without_a_listener_a_full_disk_raises() -> None:
    writer = LineWriter(Path("/dev/full")) if os.path.exists("/dev/full") else pytest.skip("no /dev/full")
    with pytest.raises(EnvironmentFault, match="No space left on device"):
        writer.write({"step": 1})
    writer.close()
