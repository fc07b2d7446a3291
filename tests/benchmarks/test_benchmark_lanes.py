"""A lane runs only while it is its turn. Its side here is a process that does nothing but stamp."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.lanes import DROPPED, Done, Lane, LaneFailure, Side

STAMPING = """
import pathlib, time
with open("stamps", "w", buffering=1) as stamps:
    while not pathlib.Path("stop").exists():
        time.sleep(0.002)
        stamps.write(f"{time.time()!r}\\n")
"""


def stamps(folder: Path) -> list[float]:
    path = folder / "stamps"
    return [float(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def end(process: subprocess.Popen[bytes], folder: Path) -> None:
    (folder / "stop").touch()


def done(folder: Path) -> Done:
    return Done(parameters=1, tokens_per_step=1, losses=[1.0], steps=len(stamps(folder)), hooks=[])


def side(program: str) -> Side:
    return Side("stamping", [sys.executable, "-c", program], {}, stamps, end, done)


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    with Lane(side(STAMPING), tmp_path / "lane", warmup=3, patience_s=0.0) as entered:
        yield entered


def wait_until_stopped(lane: Lane, tmp_path: Path) -> int:
    """Steps done once a step is no longer followed by another."""
    count = -1
    while count != (count := len(stamps(tmp_path / "lane"))):
        time.sleep(0.05)
    return count


def test_a_lane_stands_still_when_it_is_not_its_turn(lane: Lane, tmp_path: Path) -> None:
    assert wait_until_stopped(lane, tmp_path) >= 3
    before = wait_until_stopped(lane, tmp_path)
    block = lane.block(4)
    assert len(block.step_s) == 4
    assert all(seconds > 0 for seconds in block.step_s)
    after = wait_until_stopped(lane, tmp_path)
    assert after >= before + DROPPED + 4


def test_the_time_for_which_a_lane_stood_still_is_in_no_step(lane: Lane, tmp_path: Path) -> None:
    stopped = wait_until_stopped(lane, tmp_path)
    block = lane.block(2)
    moments = stamps(tmp_path / "lane")
    pause = moments[stopped] - moments[stopped - 1]
    assert pause > 0.05, "wait_until_stopped takes at least 0.05 s"
    assert pause not in block.step_s
    start = moments[stopped + DROPPED - 1]
    assert block.step_s == [
        moments[stopped + DROPPED] - start,
        moments[stopped + DROPPED + 1] - moments[stopped + DROPPED],
    ]


def test_a_lane_ends_well_when_asked(lane: Lane) -> None:
    assert lane.finish().steps >= 3


def test_a_side_that_fails_says_why(tmp_path: Path) -> None:
    failing = side("raise SystemExit('no such model')")
    with (
        pytest.raises(LaneFailure, match="no such model"),
        Lane(failing, tmp_path / "lane", warmup=1, patience_s=0),
    ):
        pass
