"""Copies beside the computation: order, errors, what is counted, and the races that the order prevents."""

import threading
from collections.abc import Iterator

import pytest
import torch

from drivetrain.engine.memory import offload_copies as subject
from drivetrain.engine.memory.offload_copies import CopyEngine
from drivetrain.engine.parallel.streams import open_stream

CPU = torch.device("cpu")


@pytest.fixture
def engine() -> Iterator[CopyEngine]:
    one = CopyEngine(CPU)
    yield one
    one.close()


class Gate:
    """Work that goes on when the test says so, and not before."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(30), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()


def brought_back(engine: CopyEngine, *, ordered: bool) -> torch.Tensor:
    """What comes back of a tensor whose way to the host is delayed, with or without the event between the two."""
    source, host, back, gate = torch.ones(1000), torch.zeros(1000), torch.full((1000,), -1.0), Gate()
    engine.outward.run(gate.pass_through)
    there = engine.to_host([(source, host)])
    here = engine.to_device([(host, back)], after=there if ordered else None)
    gate.reached.wait()
    if not ordered:
        here_alone = engine.inward.record()
        here_alone.wait()
    else:
        assert not here.is_complete(), "it did not wait"
    gate.open()
    engine.wait(here)
    engine.wait(there)
    return back


def test_without_the_event_what_comes_back_is_not_what_left(engine: CopyEngine) -> None:
    assert brought_back(engine, ordered=False).eq(0).all(), "the race of the next test is not there"


def test_with_the_event_what_comes_back_is_what_left(engine: CopyEngine) -> None:
    assert brought_back(engine, ordered=True).eq(1).all()


def test_bytes_are_counted_by_direction_and_once(engine: CopyEngine) -> None:
    host = engine.host_empty(4000)
    engine.wait(engine.to_host([(torch.ones(1000).view(torch.uint8), host)]))
    back = torch.empty(1000)
    engine.wait(
        engine.to_device([(host, back.view(torch.uint8)), (host[:40], torch.empty(40, dtype=torch.uint8))])
    )
    moved = engine.take()
    assert (moved.to_host_bytes, moved.to_device_bytes, moved.nbytes) == (4000, 4040, 8040)
    assert back.eq(1).all()
    assert engine.take().nbytes == 0


def test_only_waits_that_had_to_wait_are_exposed(engine: CopyEngine) -> None:
    done = engine.to_host([(torch.ones(10), torch.empty(10))])
    engine.outward.record().wait()
    engine.wait(done)
    assert engine.take().waits == ()
    gate = Gate()
    engine.outward.run(gate.pass_through)
    late = engine.to_host([(torch.ones(10), torch.empty(10))])
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    engine.wait(late)
    opener.join()
    (wait,) = engine.take().waits
    assert wait[0] < wait[1]  # type: ignore[operator]


def test_a_copy_that_fails_is_told_to_who_waits(engine: CopyEngine) -> None:
    wrong = engine.to_host([(torch.ones(3), torch.empty(4))])
    with pytest.raises(RuntimeError, match="size"):
        engine.wait(wrong)


def test_who_copies_nothing_has_no_threads() -> None:
    before = threading.active_count()
    one = CopyEngine(CPU)
    one.take()
    one.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("direction", ["to_host", "to_device"])
def test_a_copy_comes_after_what_the_caller_has_computed_so_far(
    engine: CopyEngine, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the caller's own work is always done; a stream in its place is late, as a GPU's is."""
    source, copied, gate = torch.zeros(1000), torch.zeros(1000), Gate()
    with open_stream(CPU, "computing") as computing:
        monkeypatch.setattr(subject, "current_stream", lambda _device: computing)
        computing.run(gate.pass_through)
        computing.run(lambda: source.fill_(1.0))
        gate.reached.wait()
        end = getattr(engine, direction)([(source, copied)])
        assert not end.is_complete()
        gate.open()
        end.wait()
        assert copied.eq(1).all()
