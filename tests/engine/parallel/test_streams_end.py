"""Streams end what they were given before what they use is taken down; nobody waits for one that cannot."""

import threading

import pytest
import torch

from drivetrain.engine.parallel.streams import HostStream, let_streams_end, open_stream

CPU = torch.device("cpu")


def test_without_streams_there_is_nothing_to_wait_for() -> None:
    assert let_streams_end(60.0)


def test_work_that_was_given_is_done_and_no_later_work_is_refused() -> None:
    begin, done = threading.Event(), []
    with open_stream(CPU, "first") as first, open_stream(CPU, "second") as second:
        end = first.run(begin.wait)
        second.wait(end)
        second.run(lambda: done.append("second"))
        assert not let_streams_end(0.0), "the first has not ended"
        threading.Timer(0.05, begin.set).start()
        assert let_streams_end(60.0)
        assert done == ["second"]
        second.run(lambda: done.append("again")).wait()
    assert done == ["second", "again"]


def test_where_one_has_failed_nobody_waits_for_the_others() -> None:
    never = threading.Event()

    def fail() -> None:
        raise ValueError("it cannot")

    failing, waiting = HostStream("failing"), HostStream("waiting")
    end = failing.run(fail)
    waiting.run(never.wait)
    with pytest.raises(ValueError, match="it cannot"):
        end.wait()
    # An hour would be waited for otherwise.
    assert not let_streams_end(3600.0)
    never.set()
    waiting.close()
    failing.close()
