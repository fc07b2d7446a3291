"""Streams and events: order, errors, ends; and that an event is what keeps a consumer from unfinished data."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from drivetrain.engine.parallel.streams import CallerStream, HostStream, current_stream, open_stream

CPU = torch.device("cpu")


@pytest.fixture
def streams() -> Iterator[tuple[HostStream, HostStream]]:
    with HostStream("producer") as producer, HostStream("consumer") as consumer:
        yield producer, consumer


class Gate:
    """Work that goes on when the test says so, and not before."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(240), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()


def consumed(producer: HostStream, consumer: HostStream, *, ordered: bool) -> torch.Tensor:
    """What the consumer reads of data that a delayed producer writes, with or without the event between them."""
    data, read, gate = torch.zeros(1000), torch.full((1000,), -1.0), Gate()

    def produce() -> None:
        gate.pass_through()
        data.fill_(1.0)

    produced = producer.run(produce)
    if ordered:
        consumer.wait(produced)
    done = consumer.run(lambda: read.copy_(data))
    gate.reached.wait()
    if ordered:
        assert not done.is_complete(), "it did not wait"
    else:
        done.wait()
    gate.open()
    done.wait()
    produced.wait()
    return read


def test_without_the_event_a_consumer_reads_unfinished_data(streams: tuple[HostStream, HostStream]) -> None:
    assert consumed(*streams, ordered=False).eq(0).all(), "the race that the next test is about is not there"


def test_with_the_event_a_consumer_reads_what_the_producer_wrote(
    streams: tuple[HostStream, HostStream],
) -> None:
    assert consumed(*streams, ordered=True).eq(1).all()


def test_an_event_covers_all_that_came_before_and_nothing_that_came_after(
    streams: tuple[HostStream, HostStream],
) -> None:
    stream, _ = streams
    first, second, seen = Gate(), Gate(), []
    stream.run(first.pass_through)
    stream.run(lambda: seen.append("before"))
    between = stream.record()
    stream.run(second.pass_through)
    after = stream.record()
    assert not between.is_complete()
    first.open()
    between.wait()
    assert seen == ["before"]
    assert between.is_complete()
    assert not after.is_complete()
    second.open()
    after.wait()


def test_work_runs_in_the_order_in_which_it_was_given(streams: tuple[HostStream, HostStream]) -> None:
    stream, _ = streams
    seen: list[int] = []
    for number in range(200):
        stream.run(lambda number=number: seen.append(number))
    stream.record().wait()
    assert seen == list(range(200))


def test_the_host_waits_on_the_current_stream_alike() -> None:
    current, data = current_stream(CPU), torch.zeros(3)
    with open_stream(CPU, "beside") as beside:
        assert isinstance(current, CallerStream)
        assert isinstance(beside, HostStream)
        beside.wait(current.record())
        written = beside.run(lambda: (time.sleep(0.05), data.fill_(2.0)), tensors=(data,))
        current.wait(written)
        assert data.eq(2).all()
        current.run(lambda: data.add_(1.0)).wait()
        assert data.eq(3).all()


def test_a_stream_takes_one_core_and_leaves_its_givers_operations_theirs() -> None:
    code = """
import torch
torch.set_num_threads(3)
from drivetrain.engine.parallel.streams import HostStream
found = []
with HostStream("copies") as stream:
    stream.run(lambda: found.append(torch.get_num_threads())).wait()
    of_products = [line for line in torch.__config__.parallel_info().splitlines() if "get_max_threads" in line]
    print(found, torch.get_num_threads(), sorted({int(line.rpartition(":")[2]) for line in of_products}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=900
    )
    assert done.stdout.split("\n")[0] == "[1] 3 [3]"


def test_no_gradient_is_recorded_in_a_stream(streams: tuple[HostStream, HostStream]) -> None:
    stream, _ = streams
    weight, made = torch.ones(2, requires_grad=True), []
    stream.run(lambda: made.append(weight * 2)).wait()
    CallerStream().run(lambda: made.append(weight * 2))
    assert [one.requires_grad for one in made] == [False, False]


class Trouble(Exception):
    pass


def fail() -> None:
    raise Trouble("the wire is cut")


def test_an_error_reaches_everybody_who_waits(streams: tuple[HostStream, HostStream]) -> None:
    stream, other = streams
    gate, seen = Gate(), []
    stream.run(gate.pass_through)
    failed = stream.run(fail)
    later = stream.run(lambda: seen.append("later"))
    other.wait(later)
    behind = other.run(lambda: seen.append("behind"))
    gate.open()
    for event in (failed, later, behind):
        with pytest.raises(Trouble, match="the wire is cut"):
            event.wait()
        assert event.is_complete()
    with pytest.raises(Trouble):
        CallerStream().wait(failed)
    for broken in (stream, other):
        with pytest.raises(Trouble):
            broken.run(lambda: seen.append("again"))
        with pytest.raises(Trouble):
            broken.record()
    assert seen == []


def test_an_error_that_many_are_told_does_not_grow() -> None:
    with HostStream("short") as stream:
        failed = stream.run(fail)
        lengths = []
        for _ in range(3):
            with pytest.raises(Trouble) as caught:
                failed.wait()
            lengths.append(len(caught.traceback))
        assert len(set(lengths)) == 1


def test_an_error_that_nobody_waited_for_comes_out_at_the_end() -> None:
    stream = HostStream("unwatched")
    stream.run(fail)
    with pytest.raises(Trouble):
        stream.close()
    stream.close()  # it was told


def test_the_error_under_way_is_not_hidden_by_one_of_the_stream() -> None:
    stream = HostStream("unwatched")
    stream.run(fail)
    with pytest.raises(KeyError), stream:
        raise KeyError("mine")


def threads_called(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"stream {name}"]


def test_a_closed_stream_has_done_its_work_and_left_no_thread() -> None:
    seen: list[int] = []
    stream = HostStream("closing")
    for number in range(20):
        stream.run(lambda number=number: seen.append(number))
    stream.close()
    assert len(seen) == 20
    assert threads_called("closing") == []
    with pytest.raises(AssertionError, match="closed"):
        stream.run(lambda: None)


def test_a_forgotten_stream_does_its_work_and_leaves_no_thread() -> None:
    stream = HostStream("forgotten")
    end = stream.run(lambda: None)
    del stream
    gc.collect()
    end.wait()
    for thread in threads_called("forgotten"):
        thread.join(60)  # an end that nobody waits for longer than a moment
    assert threads_called("forgotten") == []


def test_an_idle_stream_keeps_nothing_alive(streams: tuple[HostStream, HostStream]) -> None:
    stream, _ = streams
    data = torch.zeros(10)
    kept = weakref.ref(data)
    stream.run(lambda data=data: data.add_(1)).wait()
    del data
    stream.record().wait()
    assert kept() is None


class Measured:
    """Work, or an event, that takes a moment and knows how long it took."""

    def __init__(self) -> None:
        self.took_s = 0.0

    def wait(self) -> None:
        since = time.perf_counter()
        time.sleep(0.02)
        self.took_s = time.perf_counter() - since

    def is_complete(self) -> bool:
        return False


def test_time_is_divided_into_busy_blocked_and_idle(streams: tuple[HostStream, HostStream]) -> None:
    stream, _ = streams
    stream.record().wait()
    stream.take_usage()
    awaited, work, between = Measured(), Measured(), Measured()
    stream.wait(awaited)
    stream.run(work.wait).wait()
    between.wait()
    usage = stream.take_usage()
    assert usage.runs == 1
    assert usage.blocked_s is not None
    assert usage.blocked_s >= awaited.took_s
    assert usage.busy_s >= work.took_s
    assert usage.idle_s >= between.took_s
    assert usage.wall_s >= awaited.took_s + work.took_s + between.took_s
    after = stream.take_usage()
    assert (after.runs, after.busy_s, after.blocked_s) == (0, 0.0, 0.0), "it was taken before"


def test_the_current_stream_is_busy_unless_it_waits() -> None:
    caller, awaited, work = CallerStream(), Measured(), Measured()
    caller.run(work.wait)
    caller.wait(awaited)
    usage = caller.take_usage()
    assert usage.blocked_s is not None
    assert usage.blocked_s >= awaited.took_s
    assert usage.busy_s >= work.took_s
    assert (usage.runs, usage.idle_s) == (1, 0.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_ends_without_the_streams_of_its_parent() -> None:
    stream = HostStream("parent's")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            stream.run(lambda: None)
        except AssertionError:
            del stream
            gc.collect()
            code = 0
        os._exit(code)
    deadline = time.monotonic() + 600
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    stream.run(lambda: None).wait()
    stream.close()


@pytest.mark.long
@pytest.mark.parametrize("last_line", ["pass", "stream.run(lambda: time.sleep(3600))", "raise SystemExit(3)"])
def test_an_interpreter_ends_whatever_its_streams_do(last_line: str) -> None:
    program = (
        "import time; from drivetrain.engine.parallel.streams import HostStream\n"
        f"stream = HostStream('left'); stream.run(lambda: None)\n{last_line}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stderr) == (3 if "Exit" in last_line else 0, "")
