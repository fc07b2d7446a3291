"""What collectives cost a step: figures by hand, and against a count of single nanoseconds."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.measure.overlap import (
    FlightRecord,
    GroupOverlap,
    Line,
    StepOverlap,
    flights_of,
    overlap_of,
    rows_of,
    turns,
)


def flight(
    issued: int,
    completed: int | None,
    *blocked: tuple[int, int],
    group: str = "dp",
    sequence: int = 0,
    bytes: int = 100,
    queue: str | None = None,
) -> FlightRecord:
    return FlightRecord(
        group=group,
        kind="all_reduce",
        bytes=bytes,
        queue=queue or group,
        sequence=sequence,
        issued_ns=issued,
        completed_ns=completed,
        blocked=blocked,
    )


def test_a_collective_that_waits_in_its_queue_is_under_way_from_its_turn_on() -> None:
    flights = [flight(0, 50), flight(10, 90, sequence=1), flight(20, 100, sequence=2)]
    assert turns(flights, 100, 1) == [(0, 50), (50, 90), (90, 100)]
    assert turns(flights, 100, 2) == [(0, 50), (10, 90), (50, 100)], (
        "two at once: the third takes the first's place"
    )
    assert turns(flights, 100, 3) == [(0, 50), (10, 90), (20, 100)]


def test_queues_do_not_wait_for_each_other() -> None:
    flights = [flight(0, 50), flight(10, 30, group="tp")]
    assert turns(flights, 100, 1) == [(0, 50), (10, 30)]


def test_a_collective_that_is_not_complete_ends_with_the_step() -> None:
    assert turns([flight(10, None)], 70, 1) == [(10, 70)]
    assert turns([flight(80, None)], 70, 1) == [(80, 80)], "it began after the step: no time is negative"


def test_what_nobody_waits_for_is_hidden_and_the_rest_is_exposed() -> None:
    # Under way 10-40 and 50-90; the host stands from 70 to 95, and took 5 of that to wake up.
    found = overlap_of(
        [flight(10, 40), flight(50, 90, (70, 95), sequence=1)], (0, 100), lanes=1, backward=(5, 60)
    )
    assert (found.wire_ns, found.hidden_ns, found.exposed_ns) == (70, 50, 20)
    assert found.overlap_frac == pytest.approx(50 / 70)
    assert found.exposed_frac == pytest.approx(0.2)
    (group,) = found.groups.values()
    # Free: 0-10, 40-50, 95-100; of that in backward: 5-10, 40-50.
    assert (group.idle_ns, group.backward_idle_ns, found.backward_ns) == (25, 15, 55)
    assert (group.calls, group.bytes) == (2, 200)


def test_waiting_for_one_group_hides_nothing_of_another() -> None:
    found = overlap_of(
        [flight(0, 60), flight(20, 50, (20, 50), group="tp")], (0, 100), lanes=2, backward=None
    )
    assert found.groups["dp"].hidden_ns == 30, (
        "while the host stood waiting for tp, dp had nothing to hide under"
    )
    assert found.groups["dp"].exposed_ns == 0
    assert found.groups["tp"].exposed_ns == 30
    assert found.groups["tp"].hidden_ns == 0
    assert (found.wire_ns, found.hidden_ns, found.exposed_ns) == (60, 30, 30)


def test_a_collective_over_the_border_of_two_steps_is_in_each_with_its_part_and_counts_once() -> None:
    over = flight(80, 130, (120, 130))
    first, second = (overlap_of([over], window, lanes=1) for window in ((0, 100), (100, 200)))
    assert (first.wire_ns, second.wire_ns) == (20, 30)
    assert (first.exposed_ns, second.exposed_ns) == (0, 10)
    assert (first.groups["dp"].calls, second.groups["dp"].calls) == (1, 0)
    assert (first.groups["dp"].bytes, second.groups["dp"].bytes) == (100, 0)


def test_a_step_without_collectives_has_no_share_of_them() -> None:
    found = overlap_of([], (0, 100), lanes=1)
    assert found.overlap_frac is None
    assert found.exposed_frac == 0.0
    assert StepOverlap().exposed_frac is None


def test_sums_of_steps_are_sums_of_all_their_parts() -> None:
    one = overlap_of([flight(0, 10, (5, 10))], (0, 100), lanes=1, backward=(0, 50))
    two = overlap_of([flight(0, 30, group="tp")], (0, 50), lanes=1)
    both = one + two
    assert (both.steps, both.window_ns, both.wire_ns, both.exposed_ns) == (2, 150, 40, 5)
    assert both.groups["dp"] == one.groups["dp"]
    assert both.groups["tp"] == two.groups["tp"]
    for part in dataclasses.fields(GroupOverlap):
        if part.name != "kinds":
            twice = getattr((one + one).groups["dp"], part.name)
            assert twice == 2 * getattr(one.groups["dp"], part.name), part.name
    for part in dataclasses.fields(StepOverlap):
        if part.name != "groups":
            assert getattr(one + one, part.name) == 2 * getattr(one, part.name), part.name


def test_cost_of_a_call_and_of_a_byte_follow_from_collectives_of_two_sizes() -> None:
    flights = [
        flight(1000 * number, 1000 * number + 50 + 2 * size, sequence=number, bytes=size)
        for number, size in enumerate((10, 200, 30, 200))
    ]
    found = overlap_of(flights, (0, 5000), lanes=1).groups["dp"].kinds["all_reduce"].line.fit()
    assert found == pytest.approx((50.0, 2.0))


@pytest.mark.parametrize(
    "points",
    [[], [(100, 5)], [(100, 5), (100, 7)], [(100, 5), (200, 3)], [(100, 1), (200, 30)]],
    ids=["none", "one", "one size", "larger is faster", "less than nothing for a call"],
)
def test_no_line_is_laid_through_points_that_give_none(points: Sequence[tuple[int, int]]) -> None:
    line = Line()
    for x, y in points:
        line += Line(1, float(x), float(y), float(x * x), float(x * y))
    assert line.fit() is None


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[FlightRecord], tuple[int, int], int]:
    flights = []
    for sequence in range(draw(st.integers(0, 6))):
        issued = draw(st.integers(0, 60))
        completed = draw(st.one_of(st.none(), st.integers(issued, 90)))
        blocked = []
        if draw(st.booleans()):
            start = draw(st.integers(issued, 90))
            blocked.append((start, draw(st.integers(start, 95))))
        group = draw(st.sampled_from(["dp", "tp"]))
        flights.append(flight(issued, completed, *blocked, group=group, sequence=sequence))
    start = draw(st.integers(0, 30))
    return flights, (start, draw(st.integers(start, 100))), draw(st.integers(1, 3))


@given(steps())
def test_every_figure_equals_a_count_of_single_nanoseconds(
    case: tuple[list[FlightRecord], tuple[int, int], int],
) -> None:
    flights, (start, end), lanes = case
    found = overlap_of(flights, (start, end), lanes=lanes, backward=(20, 50))
    spans = turns(flights, end, lanes)
    wire = {t for a, b in spans for t in range(max(a, start), min(b, end))}
    waits = {t for one in flights for a, b in one.blocked for t in range(max(a, start), min(b, end))}
    assert (found.wire_ns, found.exposed_ns, found.hidden_ns) == (
        len(wire),
        len(wire & waits),
        len(wire - waits),
    )
    for name, group in found.groups.items():
        own = [index for index, one in enumerate(flights) if one.group == name]
        mine = {t for i in own for t in range(max(spans[i][0], start), min(spans[i][1], end))}
        free = set(range(start, end)) - mine - waits
        assert group.wire_ns == len(mine)
        assert group.hidden_ns == len(mine - waits)
        own_waits = {t for i in own for a, b in flights[i].blocked for t in range(max(a, start), min(b, end))}
        assert group.exposed_ns == len(mine & own_waits)
        assert group.idle_ns == len(free)
        assert group.backward_idle_ns == len(free & set(range(20, 50)))


@given(steps(), st.integers(1, 3))
def test_no_queue_has_more_under_way_than_it_has_workers(
    case: tuple[list[FlightRecord], tuple[int, int], int], lanes: int
) -> None:
    flights, (_, end), _ = case
    spans = turns(flights, end, lanes)
    for queue in ("dp", "tp"):
        mine = [span for span, one in zip(spans, flights, strict=True) if one.queue == queue]
        for time in range(100):
            assert sum(a <= time < b for a, b in mine) <= lanes


@given(steps())
def test_rows_give_back_the_flights(case: tuple[list[FlightRecord], tuple[int, int], int]) -> None:
    assert flights_of(rows_of(case[0])) == case[0]


@pytest.mark.parametrize(
    "row",
    [
        [],
        "text",
        ["dp", "all_reduce", 1, "0", 0, 5, 6, True],
        ["dp", "all_reduce", 1, "0", 0, "5", 6, True, []],
        ["dp", "all_reduce", 1, "0", 0, 5, 6, True, [[1]]],
        ["dp", "all_reduce", 1, "0", 0, 5, 6, True, [["a", 2]]],
    ],
)
def test_what_is_no_row_is_refused(row: Any) -> None:
    with pytest.raises(ValueError, match="not a row"):
        flights_of([row])


def test_kinds_of_one_group_have_figures_of_their_own() -> None:
    gather = dataclasses.replace(flight(50, 80, (60, 80), sequence=1, bytes=7), kind="all_gather")
    found = overlap_of([flight(0, 40, (35, 40)), gather], (0, 100), lanes=1).groups["dp"]
    parts = {kind: (one.calls, one.bytes, one.wire_ns, one.exposed_ns) for kind, one in found.kinds.items()}
    assert parts == {"all_reduce": (1, 100, 40, 5), "all_gather": (1, 7, 30, 20)}
    assert (found.calls, found.bytes, found.wire_ns, found.exposed_ns) == (2, 107, 70, 25)
    twice = (overlap_of([gather], (0, 100), lanes=1) + overlap_of([gather], (0, 100), lanes=1)).groups["dp"]
    assert (twice.kinds["all_gather"].calls, twice.kinds["all_gather"].line.n) == (2, 2)
