"""The clock of ``benchmarks/gpu.py``, with a device that is played: what is timed, and what is not."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_parts.clock import Budget, CudaClock, DryClock, Turn, interleaved

MARK_S = 1e-4


class PlayedCuda:
    """Stands for ``torch.cuda``: its time passes with calls that say so, and a little with each event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.held = 0
        self.most = 0

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(L2_cache_size=32 << 20)

    def synchronize(self, device: torch.device) -> None:
        self.log.append("wait")

    def empty_cache(self) -> None:
        self.log.append("empty")

    def memory_allocated(self, device: torch.device) -> int:
        return self.held

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.most

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.most = self.held

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        return PlayedEvent(self)

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now += seconds

        return run


class PlayedEvent:
    def __init__(self, cuda: PlayedCuda) -> None:
        self.cuda = cuda
        self.at = -1.0

    def record(self) -> None:
        self.cuda.log.append("mark")
        self.cuda.now += MARK_S
        self.at = self.cuda.now

    def synchronize(self) -> None:
        self.cuda.log.append("catch up")

    def elapsed_time(self, later: "PlayedEvent") -> float:
        return (later.at - self.at) * 1e3


@pytest.fixture
def cuda() -> PlayedCuda:
    return PlayedCuda()


@pytest.fixture
def clock(cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch) -> CudaClock:
    made = CudaClock(torch.device("cpu"), cuda)
    flush = SimpleNamespace(zero_=cuda.call("flush", 0.5))
    monkeypatch.setattr(made, "_buffer", flush)
    monkeypatch.setattr(made, "_flush_s", 1.0)
    cuda.log.clear()
    return made


def test_the_buffer_that_empties_the_cache_is_four_times_as_large(cuda: PlayedCuda) -> None:
    assert CudaClock(torch.device("cpu"), cuda).flush_bytes == 4 * (32 << 20)


def test_a_call_is_timed_alone_with_an_empty_cache_and_warm(clock: CudaClock, cuda: PlayedCuda) -> None:
    turn = clock.turn(cuda.call("call", 0.25), 2)
    assert cuda.log == [
        *("wait", "call"),
        *("flush", "mark", "call", "mark") * 2,
        "wait",
    ]
    assert turn.times == pytest.approx([0.25 + MARK_S] * 2)


def test_the_device_is_kept_busy_for_longer_than_the_host_takes_to_hand_in_a_call(
    clock: CudaClock, cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "_flush_s", 0.004)

    def slow() -> None:
        time.sleep(0.02)
        cuda.log.append("call")

    turn = clock.turn(slow, 1)
    flushes = cuda.log.count("flush")
    assert turn.host_s >= 0.02
    assert flushes * 0.004 >= min(turn.host_s, 64 * 0.004)
    assert cuda.log.index("flush") > cuda.log.index("call"), "the call that measures the host has none"


def test_steps_are_timed_from_end_to_end_and_warm(clock: CudaClock, cuda: PlayedCuda) -> None:
    times = clock.periods(cuda.call("step", 0.25), Budget.of(60), warm=2, least=3, most=4)
    assert times == pytest.approx([0.25 + MARK_S] * 4)
    assert cuda.log[:3] == ["step", "step", "mark"]
    assert "flush" not in cuda.log
    assert cuda.log.count("catch up") == 4, "the host stays near"


def test_the_least_number_of_steps_is_timed_when_time_is_up(clock: CudaClock, cuda: PlayedCuda) -> None:
    assert len(clock.periods(cuda.call("step", 0.25), Budget.of(0), warm=0, least=3, most=9)) == 3


def test_bytes_are_counted_beyond_what_was_held(clock: CudaClock, cuda: PlayedCuda) -> None:
    cuda.held = 100

    def call() -> None:
        cuda.most = 350

    assert clock.peak_bytes(call) == 250


def test_settling_waits_and_gives_memory_back(clock: CudaClock, cuda: PlayedCuda) -> None:
    clock.settle()
    assert cuda.log == ["wait", "empty"]


def test_a_dry_clock_runs_what_it_is_given_and_has_no_figures() -> None:
    calls: list[int] = []
    clock = DryClock()
    assert clock.turn(lambda: calls.append(1), 5) == Turn((), 0.0)
    assert clock.periods(lambda: calls.append(1), Budget.of(1), warm=1, least=1, most=2) == []
    assert clock.peak_bytes(lambda: calls.append(1)) is None
    clock.settle()
    assert len(calls) == 4


class Counting(DryClock):
    """Gives each turn the next number as its time."""

    def __init__(self, order: list[str]) -> None:
        self.order = order

    def turn(self, call: Callable[[], Any], repeats: int) -> Turn:
        call()
        return Turn([float(len(self.order))] * repeats, 1.0 / len(self.order))


def test_sides_take_turns_so_that_drift_hits_all_alike() -> None:
    order: list[str] = []
    sides = {name: (lambda name=name: order.append(name)) for name in "abc"}
    found = interleaved(Counting(order), sides, Budget.of(60), rounds=2, repeats=1)
    assert order == list("abccba") * 2
    assert found["a"].times == [1.0, 6.0, 7.0, 12.0]
    assert sum(found["b"].times) == sum(found["c"].times) == sum(found["a"].times)
    assert found["a"].host_s == pytest.approx(1 / 12), "the least"


def test_one_round_is_run_though_time_is_up() -> None:
    order: list[str] = []
    found = interleaved(Counting(order), {"a": lambda: order.append("a")}, Budget.of(0), rounds=8, repeats=3)
    assert len(found["a"].times) == 6


def test_a_budget_is_shared_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    budget = Budget.of(30)
    assert budget.share(3).left == pytest.approx(10)
    assert not budget.spent
    now[0] += 31
    assert budget.spent
    assert budget.left == 0.0
    assert budget.share(3).spent
