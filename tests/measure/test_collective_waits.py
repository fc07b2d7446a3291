"""Matching the collectives of several ranks: who was waited for, and how long bytes then moved."""

from dataclasses import replace

from drivetrain.measure.collective_waits import match, summed
from drivetrain.measure.overlap import FlightRecord

ALIGNED = {0: (0, 0), 1: (0, 0)}
QUEUES = {0: {"0": [0, 1]}, 1: {"0": [0, 1]}}


def flight(
    issued: int,
    completed: int | None,
    *,
    sequence: int = 0,
    kind: str = "all_reduce",
    queue: str = "0",
    group: str = "dp",
) -> FlightRecord:
    return FlightRecord(group, kind, 100, queue, sequence, issued, completed)


def test_a_rank_waits_until_the_last_one_comes_and_the_rest_is_transfer() -> None:
    (one,) = match({0: [flight(0, 100)], 1: [flight(70, 101)]}, QUEUES, ALIGNED, lanes=1)
    assert one.last == 1
    assert one.wait_ns == {0: 70, 1: 0}
    assert one.transfer_ns == {0: 30, 1: 31}


def test_of_a_transfer_that_is_exposed_which_the_training_thread_waits_for() -> None:
    # Rank 0 waits from 20 on, 50 of it for the last rank; rank 1 computes until 90.
    zero = replace(flight(0, 100), blocked=((20, 101),))
    one = replace(flight(70, 101), blocked=((90, 102),))
    (found,) = match({0: [zero], 1: [one]}, QUEUES, ALIGNED, lanes=1)
    assert found.exposed_ns == {0: 30, 1: 11}
    offsets = {0: (0, 0), 1: (1000, 0)}
    later = replace(flight(1070, 1101), blocked=((1090, 1102),))
    (shifted,) = match({0: [zero], 1: [later]}, QUEUES, offsets, lanes=1)
    assert shifted.exposed_ns == found.exposed_ns, "each on its own clock"


def test_a_rank_comes_when_its_queue_lets_it() -> None:
    # The second was handed over at 5, and could start when the first was done at 100.
    zero = [flight(0, 100), flight(5, 150, sequence=1)]
    one = [flight(0, 100), flight(120, 150, sequence=1)]
    _, second = match({0: zero, 1: one}, QUEUES, ALIGNED, lanes=1)
    assert second.wait_ns == {0: 20, 1: 0}
    assert second.transfer_ns == {0: 30, 1: 30}


def test_clocks_that_differ_are_brought_together_and_their_error_is_kept() -> None:
    offsets = {0: (0, 2), 1: (1000, 3)}
    (one,) = match({0: [flight(0, 100)], 1: [flight(1070, 1101)]}, QUEUES, offsets, lanes=1)
    assert one.wait_ns == {0: 70, 1: 0}
    assert one.error_ns == 6, (
        "of the last rank against itself nothing is in doubt, of two ranks both clocks are"
    )


def test_a_rank_that_is_done_before_the_last_comes_waited_until_then_only() -> None:
    (one,) = match({0: [flight(0, 30)], 1: [flight(70, 100)]}, QUEUES, ALIGNED, lanes=1)
    assert one.wait_ns[0] == 30
    assert one.transfer_ns[0] == 0


def test_what_only_some_ranks_have_or_call_otherwise_is_not_matched() -> None:
    zero = [flight(0, 10), flight(20, 30, sequence=1), flight(40, None, sequence=2)]
    one = [flight(0, 10, kind="all_gather"), flight(40, 50, sequence=2)]
    assert match({0: zero, 1: one}, QUEUES, ALIGNED, lanes=1) == []


def test_groups_of_one_name_over_other_ranks_are_apart() -> None:
    queues = {0: {"0": [0, 1]}, 1: {"0": [0, 1]}, 2: {"0": [2, 3]}, 3: {"0": [2, 3]}}
    offsets = dict.fromkeys(range(4), (0, 0))
    flights = {rank: [flight(10 * rank, 100)] for rank in range(4)}
    found = summed(match(flights, queues, offsets, lanes=1))
    assert [(one.ranks, one.collectives, one.wait_ns) for one in found] == [
        ((0, 1), 1, {0: 10, 1: 0}),
        ((2, 3), 1, {2: 10, 3: 0}),
    ]


def waits_by_group(
    queues: dict[int, dict[str, list[int]]], names: dict[int, tuple[str, str]]
) -> list[object]:
    """Two groups of the same two ranks, each of which has its collective number 0; ``names``: by rank, of the two."""
    flights = {
        rank: [
            flight(10 * rank, 100, queue=first),
            flight(200 + 30 * (1 - rank), 300, queue=second, group="tp"),
        ]
        for rank, (first, second) in names.items()
    }
    return [(one.group, one.queue, dict(one.wait_ns)) for one in match(flights, queues, ALIGNED, lanes=1)]


BOTH = [("dp", 0, {0: 10, 1: 0}), ("tp", 1, {0: 0, 1: 30})]


def test_two_groups_of_the_same_ranks_are_not_mixed() -> None:
    queues = {rank: {"3": [0, 1], "5": [0, 1]} for rank in range(2)}
    assert waits_by_group(queues, {0: ("3", "5"), 1: ("3", "5")}) == BOTH


def test_groups_of_the_same_ranks_that_the_ranks_name_differently_are_taken_in_the_order_they_were_made() -> (
    None
):
    queues = {0: {"9": [0, 1], "10": [0, 1]}, 1: {"12": [0, 1], "7": [0, 1]}}
    assert waits_by_group(queues, {0: ("9", "10"), 1: ("7", "12")}) == BOTH


def test_of_groups_that_cannot_be_told_apart_those_with_one_name_on_all_ranks_are_matched() -> None:
    queues = {0: {"3": [0, 1], "5": [0, 1]}, 1: {"5": [0, 1], "6": [0, 1], "8": [0, 1]}}
    assert waits_by_group(queues, {0: ("3", "5"), 1: ("6", "5")}) == [("tp", 0, {0: 0, 1: 30})]


def test_sums_tell_who_came_last_how_often() -> None:
    zero = [flight(0, 50), flight(60, 99, sequence=1), flight(130, 150, sequence=2)]
    one = [flight(10, 50), flight(70, 99, sequence=1), flight(110, 150, sequence=2)]
    (sums,) = summed(match({0: zero, 1: one}, QUEUES, ALIGNED, lanes=1))
    assert sums.times_last == {1: 2, 0: 1}
    assert sums.wait_ns == {0: 20, 1: 20}
    assert sums.transfer_ns == {0: 40 + 29 + 20, 1: 40 + 29 + 20}
