"""Collectives as flights: what is kept of each, on real gloo groups."""

import time
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.config.layout import Layout
from drivetrain.engine.parallel import flights as module
from drivetrain.engine.parallel.clocks import Alignment, align, offset_from
from drivetrain.engine.parallel.collectives import Group
from drivetrain.engine.parallel.flat_collectives import CountedGroup
from drivetrain.engine.parallel.flights import Flight, Flights, flown, watched
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

LATE_S = 0.2


@contextmanager
def gloo() -> Any:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        yield group


def plain(flight: Flight) -> dict[str, Any]:
    record = flight.record()
    return {
        "what": (record.group, record.kind, record.bytes, record.sequence),
        "issued": record.issued_ns,
        "completed": record.completed_ns,
        "exact": record.exact,
        "blocked": record.blocked,
    }


def _late_peer() -> list[dict[str, Any]]:
    """Rank 1 comes late to the second of three collectives; rank 0 has something else to do meanwhile."""
    with gloo():
        traffic = Traffic(flights=Flights())
        assert traffic.flights is not None
        group = CountedGroup(dist.group.WORLD, "dp", traffic)
        warm = torch.zeros(4)
        group.all_reduce(warm).wait()
        traffic.flights.begin_step()
        first, second = torch.ones(1000), torch.ones(20)
        works = [group.all_reduce(first)]
        works[0].wait()
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        works.append(group.all_reduce(second))
        works.append(group.all_gather(torch.zeros(2, 5), torch.ones(5)))
        if dist.get_rank() == 0:
            time.sleep(LATE_S / 2)
        for work in works:
            work.wait()
        taken, _ = traffic.flights.take()
        assert all(work.is_completed() for work in works)
        return [plain(flight) for flight in taken]


def test_a_flight_says_what_was_handed_over_when_and_when_it_was_complete() -> None:
    zero, one = on_kept_ranks(_late_peer, 2)
    for flights in (zero, one):
        assert [flight["what"] for flight in flights] == [
            ("dp", "all_reduce", 4000, 0),
            ("dp", "all_reduce", 80, 1),
            ("dp", "all_gather", 20, 2),
        ], "the one before the step was not kept, and numbers begin with the first that is"
        assert all(flight["issued"] < flight["completed"] for flight in flights)
        assert all(flight["exact"] for flight in flights), "gloo tells of each completion"
    # Both ranks have one clock.
    assert zero[1]["completed"] > one[1]["issued"], "rank 0's was under way until rank 1 had come"
    ((stood_from, stood_until),) = zero[1]["blocked"]
    assert stood_from >= zero[1]["issued"] + LATE_S / 2 * 1e9, (
        "part of it hid under what rank 0 did meanwhile"
    )
    assert stood_until >= zero[1]["completed"]


def test_completion_is_seen_when_it_happens_and_not_when_somebody_waits() -> None:
    (hidden, _) = on_kept_ranks(_hidden, 2)
    assert hidden["completed"] < hidden["woke"], "nobody had waited for it by then"
    assert all(start > hidden["completed"] for start, _ in hidden["blocked"])


def _hidden() -> dict[str, Any]:
    with gloo():
        traffic = Traffic(flights=Flights())
        assert traffic.flights is not None
        traffic.flights.begin_step()
        work = CountedGroup(dist.group.WORLD, "dp", traffic).all_reduce(torch.ones(100))
        while not work.is_completed():
            time.sleep(0.01)
        woke = time.perf_counter_ns()
        work.wait()
        (flight,) = traffic.flights.take()[0]
        return {**plain(flight), "woke": woke}


def _synchronous() -> Any:
    with gloo():
        traffic = Traffic(flights=Flights())
        assert traffic.flights is not None
        traffic.flights.begin_step()
        group = Group("tp", dist.group.WORLD, 2, dist.get_rank(), traffic)
        values = torch.arange(4.0) + dist.get_rank()
        sums = group.all_reduce(values)
        whole = group.all_gather(values)
        part = group.reduce_scatter(values)
        taken, _ = traffic.flights.take()
        return (
            [sums.tolist(), whole.tolist(), part.tolist()],
            [flight.record().kind for flight in taken],
            [plain(flight) for flight in taken],
            {key: (count.calls, count.bytes) for key, count in traffic.counts.items()},
        )


def test_nothing_hides_of_a_collective_that_is_waited_for_at_once() -> None:
    for rank, (results, kinds, flights, counts) in enumerate(on_kept_ranks(_synchronous, 2)):
        assert results[0] == [1.0, 3.0, 5.0, 7.0]
        assert results[1] == [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
        assert results[2] == results[0][2 * rank : 2 * rank + 2]
        assert kinds == ["all_reduce", "all_gather", "reduce_scatter"]
        for flight in flights:
            ((start, end),) = flight["blocked"]
            assert end >= flight["completed"] > start >= flight["issued"]
        assert counts == {("tp", kind): (1, 16) for kind in kinds}, (
            "counts are what they were without flights"
        )


def _groups() -> Any:
    """Two groups of a layout, and the group of all: each has numbers of its own."""
    with gloo() as group:
        mesh = Mesh.form(Layout(tp=2, dp=2), group.ranks.rank)
        traffic = Traffic(flights=group.flights)
        group.flights.begin_step()
        tp = Group("tp", mesh.group("tp"), 2, mesh.index("tp"), traffic)  # type: ignore[arg-type]
        dp = CountedGroup(mesh.group("dp"), "dp", traffic)
        pending = group.start_sum([1])
        tp.all_reduce(torch.ones(2))
        work = dp.all_reduce(torch.ones(2))
        tp.all_reduce(torch.ones(2))
        work.wait()
        assert pending.wait() == [4]
        taken = [flight.record() for flight in group.flights.take()[0]]
        members = group.flights.members
        return [(one.group, one.sequence, members[one.queue]) for one in taken]


def test_flights_are_numbered_in_each_process_group_and_its_ranks_are_known() -> None:
    for rank, found in enumerate(on_kept_ranks(_groups, 4)):
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        column = (rank % 2, rank % 2 + 2)
        assert found == [
            ("world", 0, (0, 1, 2, 3)),
            ("tp", 0, pair),
            ("dp", 0, column),
            ("tp", 1, pair),
        ]


class _Answered(dist.Work):
    """A work without a future, that is done when it is waited for."""

    def wait(self, timeout: Any = None) -> bool:
        time.sleep(0.001)
        return True

    def get_future(self) -> Any:
        raise RuntimeError("it has none")


def begun(flights: Flights) -> Flight:
    flight = flights.begin("dp", "send", 8, _Named("0"))  # type: ignore[arg-type]
    assert flight is not None
    return flight


class _Named:
    """Stands for a process group."""

    def __init__(self, name: str) -> None:
        self.group_name = name


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> Flights:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _group: [0, 1])
    made = Flights()
    made.begin_step()
    return made


def test_a_work_without_a_future_is_complete_when_the_wait_returns_and_says_so(flights: Flights) -> None:
    flight = begun(flights)
    work = watched(_Answered(), flight)
    assert flight.completed_ns is None
    assert work.wait()
    assert flight.completed_ns is not None
    assert not flight.exact
    assert len(flight.blocked) == 1


def test_another_thread_that_waits_blocks_nobody(flights: Flights) -> None:
    import threading

    flight = begun(flights)
    other = threading.Thread(target=watched(_Answered(), flight).wait)
    other.start()
    other.join()
    assert flight.completed_ns is not None
    assert flight.blocked == []


def test_an_error_of_a_wait_reaches_whoever_waits(flights: Flights) -> None:
    class Broken(_Answered):
        def wait(self, timeout: Any = None) -> bool:
            raise RuntimeError("the peer has gone")

    with pytest.raises(RuntimeError, match="the peer has gone"):
        watched(Broken(), begun(flights)).wait()


def test_nothing_is_kept_before_the_first_step_and_what_was_complete_before_one_is_forgotten(
    flights: Flights,
) -> None:
    assert Flights().begin("dp", "send", 8, None) is None
    done, open_one = begun(flights), begun(flights)
    done.landed()
    flights.begin_step()
    assert flights.take()[0] == [open_one]
    assert flights.take()[0] == [open_one], "it is still under way"
    open_one.landed()
    assert flights.take()[0] == [open_one]
    assert flights.take()[0] == []


def test_backward_is_from_its_beginning_to_its_end(flights: Flights) -> None:
    flights.end_backward()
    assert flights.take()[1] is None, "it has not begun"
    flights.begin_backward()
    flights.end_backward()
    backward = flights.take()[1]
    assert backward is not None
    assert backward[0] <= backward[1]
    assert flights.take()[1] is None


def test_memory_is_bounded_and_what_was_not_kept_is_counted(
    flights: Flights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_FLIGHTS", 3)
    kept = [flights.begin("dp", "send", 8, _Named("0")) for _ in range(5)]  # type: ignore[arg-type]
    assert [flight is not None for flight in kept] == [True, True, True, False, False]
    taken, _ = flights.take()
    assert len(taken) == 3
    assert flights.take_dropped() == 2
    assert flights.take_dropped() == 0
    for flight in taken:
        flight.landed()
    flights.begin_step()
    later = begun(flights)
    assert later.sequence == 5, "those that were not kept have their numbers: other ranks may have kept them"


def test_without_flights_a_collective_is_what_it_was() -> None:
    seen: list[bool] = []

    def launch(go_on: bool) -> None:
        seen.append(go_on)

    flown(launch, None)
    assert seen == [False]
    work = _Answered()
    assert watched(work, None) is work


@pytest.mark.parametrize(("ahead", "skew"), [(0, 0), (12_345, 40), (-7, 3)])
def test_an_offset_is_within_its_error_of_the_truth(ahead: int, skew: int) -> None:
    # Rounds of three lengths; the ranks enter at different times, and leave after both have entered.
    first, own = [], []
    for start, length in ((0, 90), (1000, 30), (2000, 50)):
        both = start + skew
        first += [start, both + length]
        own += [both + ahead, both + length // 2 + ahead]
    found = offset_from(first, own)
    assert abs(found.offset_ns - ahead) <= found.error_ns
    assert found.error_ns <= (30 + 15 + skew + 1) // 2, "the tightest round decides"


def _clocks() -> Alignment:
    with gloo() as group:
        return align(group)


def test_clocks_of_one_machine_are_found_to_agree() -> None:
    zero, one = on_kept_ranks(_clocks, 2)
    assert (zero.offset_ns, zero.error_ns) == (0, 0)
    assert abs(one.offset_ns) <= one.error_ns
