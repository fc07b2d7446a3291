"""Which of a run's profile windows is its newest one."""

from collections.abc import Callable
from typing import Any

import pytest

from drivetrain.archive.profile_windows import newest_window, was_profiled
from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RunWriter
from drivetrain.errors import RunError

Make = Callable[..., RunWriter]


def profiled(writer: RunWriter, first: Any, last: Any, **changes: Any) -> None:
    fields = {
        "what": "profile",
        "first": first,
        "last": last,
        "path": f"profile/{first}-{last}",
        "file_bytes": {"rank0.json.gz": 100},
        **changes,
    }
    writer.event("window", **fields)


def steps_of(writer: RunWriter) -> tuple[int, int] | None:
    window = newest_window(open_run(writer.path))
    return None if window is None else (window["first"], window["last"])


def test_the_last_window_that_left_traces_is_the_newest(make_run: Make) -> None:
    with make_run() as writer:
        writer.open_segment(1)
        assert not was_profiled(open_run(writer.path))
        profiled(writer, 20, 22)
        profiled(writer, 30, 32)
        writer.event("window", what="profile_overhead", first=30, last=32)
        profiled(writer, 40, 42, file_bytes={})
        assert steps_of(writer) == (30, 32)
        assert was_profiled(open_run(writer.path))


def test_a_window_whose_steps_a_later_segment_repeats_is_not_the_newest(make_run: Make) -> None:
    with make_run() as writer:
        writer.open_segment(1)
        profiled(writer, 10, 12)
        profiled(writer, 40, 42)
        writer.open_segment(42)
        assert steps_of(writer) == (10, 12)
        profiled(writer, 20, 22)
        writer.open_segment(43)
        assert steps_of(writer) == (20, 22), "the order of their making counts, not that of their steps"
        writer.open_segment(5)
        assert steps_of(writer) is None
        assert was_profiled(open_run(writer.path))


def test_a_segment_that_has_not_begun_repeats_nothing(make_run: Make) -> None:
    with make_run() as writer:
        writer.open_segment(1)
        profiled(writer, 10, 12)
        (writer.path / "segments" / "0001").mkdir()
        assert steps_of(writer) == (10, 12)


@pytest.mark.parametrize("changes", [{"last": None}, {"path": 3}, {"first": "x"}, {"file_bytes": 5}])
def test_a_window_without_its_steps_or_files_is_damage(make_run: Make, changes: dict[str, Any]) -> None:
    with make_run() as writer:
        writer.open_segment(1)
        profiled(writer, **{"first": 10, "last": 12, **changes})
    with pytest.raises(RunError, match=r"events\.jsonl is damaged: a profile window"):
        newest_window(open_run(writer.path))
