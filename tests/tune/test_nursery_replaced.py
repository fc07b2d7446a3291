"""A nursery that has closed its end is replaced, whether or not the system counts it as ended."""

import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.tune.nursery import Nursery


def test_one_that_says_nothing_more_and_still_counts_as_running_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nursery, started = Nursery(tmp_path, None, {}), []

    def start(_self: Nursery) -> None:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", "import os, time; os.close(1); time.sleep(600)"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        )
        nursery._process = started[-1]

    monkeypatch.setattr(Nursery, "_start", start)
    try:
        nursery.prepare()
        nursery.prepare()
        assert len(started) == 1
        assert nursery._line(60) == {}
        assert started[0].poll() is None
        nursery.prepare()
        assert len(started) == 2
    finally:
        nursery.close()
    assert [one.poll() is not None for one in started] == [True, True]
