"""The columns of a trace on disk: equal to those read, keyed by content, absent or whole."""

import os
from pathlib import Path

import make_odd_files as odd
import numpy as np
import pytest

from drivetrain.trace.kineto import cache
from drivetrain.trace.read import read_trace
from drivetrain.trace.table import COLUMN_DTYPES, TEXT_TABLES, Trace


@pytest.fixture
def trace_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "user"))
    path = tmp_path / "data" / "rank1.json"
    path.parent.mkdir()
    path.write_bytes((odd.DATA / "clipped_duration.json").read_bytes())
    return path


def assert_equal(one: Trace, other: Trace) -> None:
    for column in COLUMN_DTYPES:
        assert (getattr(one.events, column) == getattr(other.events, column)).all()
        assert getattr(one.events, column).dtype == getattr(other.events, column).dtype
    for table in TEXT_TABLES:
        assert getattr(one.events, table) == getattr(other.events, table)
    assert (one.rank, one.world_size, one.health, one.partial) == (
        other.rank,
        other.world_size,
        other.health,
        other.partial,
    )
    assert one.metadata == other.metadata
    rows = np.arange(len(one.events))
    assert one.arguments(rows) == other.arguments(rows)


def folders(parent: Path) -> list[Path]:
    return sorted(parent.iterdir()) if parent.exists() else []


def test_the_second_reading_comes_from_the_cache_and_is_equal(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read_trace(trace_file)
    assert len(folders(trace_file.parent / ".drivetrain-cache")) == 1
    monkeypatch.setattr("drivetrain.trace.kineto.reader._read", None)
    assert_equal(read_trace(trace_file), first)


def test_without_a_cache_nothing_is_written(trace_file: Path) -> None:
    read_trace(trace_file, cache=False)
    assert folders(trace_file.parent) == [trace_file]


def test_other_content_is_read_anew(trace_file: Path) -> None:
    read_trace(trace_file)
    trace_file.write_bytes((odd.DATA / "missing_steps.json").read_bytes())
    assert len(read_trace(trace_file).events) == 90
    assert len(folders(trace_file.parent / ".drivetrain-cache")) == 2


def test_another_version_of_the_reader_reads_anew(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_trace(trace_file)
    monkeypatch.setattr(cache, "READER_VERSION", cache.READER_VERSION + 1)
    read_trace(trace_file)
    assert len(folders(trace_file.parent / ".drivetrain-cache")) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "absent"])
@pytest.mark.parametrize("name", ["start_ns.npy", "trace.json"])
def test_a_damaged_cache_is_not_believed(trace_file: Path, damage: str, name: str) -> None:
    first = read_trace(trace_file)
    (folder,) = folders(trace_file.parent / ".drivetrain-cache")
    content = (folder / name).read_bytes()
    if damage == "absent":
        (folder / name).unlink()
    else:
        flipped = content[:-20] + bytes([content[-20] ^ 255]) + content[-19:]
        (folder / name).write_bytes({"cut": content[:-20], "flip": flipped, "empty": b""}[damage])
    assert_equal(read_trace(trace_file), first)
    assert_equal(read_trace(trace_file), first)


@pytest.mark.parametrize("how", ["mode", "obstacle"])
def test_a_folder_that_cannot_be_written_uses_the_users_cache(
    trace_file: Path, tmp_path: Path, how: str
) -> None:
    beside = trace_file.parent / ".drivetrain-cache"
    if how == "mode":
        trace_file.parent.chmod(0o555)  # the superuser could write all the same, and must not
    else:
        beside.write_bytes(b"")
    first = read_trace(trace_file)
    trace_file.parent.chmod(0o755)
    assert not beside.is_dir()
    assert len(folders(tmp_path / "user" / "traces")) == 1
    assert_equal(read_trace(trace_file), first)


def test_without_any_place_for_a_cache_the_trace_is_read_all_the_same(
    trace_file: Path, tmp_path: Path
) -> None:
    (trace_file.parent / ".drivetrain-cache").write_bytes(b"")
    (tmp_path / "user").write_bytes(b"")
    assert len(read_trace(trace_file).events) == 93


def test_the_name_of_the_file_is_no_part_of_the_cache(trace_file: Path) -> None:
    trace_file.write_bytes((odd.DATA / "missing_distributed_info.json").read_bytes())
    assert read_trace(trace_file).rank == 1
    renamed = trace_file.with_name("rank5.json")
    os.rename(trace_file, renamed)
    trace = read_trace(renamed)
    assert trace.rank == 5
    assert len(folders(trace_file.parent / ".drivetrain-cache")) == 1
    assert [finding.id for finding in trace.health] == ["missing_distributed_info"]


def test_nothing_half_written_stays(trace_file: Path) -> None:
    read_trace(trace_file)
    assert not [name for name in os.listdir(trace_file.parent / ".drivetrain-cache") if name.startswith(".")]
