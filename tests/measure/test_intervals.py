"""Interval algebra against the slow, obvious implementation: one set of nanoseconds an interval set."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from drivetrain.measure.intervals import (
    EMPTY,
    Intervals,
    clip,
    complement,
    intersect,
    partition,
    subtract,
    total,
    total_within,
    union,
    union_of,
)

moments = st.integers(min_value=-5, max_value=60)
pairs = st.lists(st.tuples(moments, moments), max_size=12)


def columns(drawn: list[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    array = np.array(drawn, np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def intervals_of(drawn: list[tuple[int, int]]) -> Intervals:
    return union(*columns(drawn))


def instants(drawn: list[tuple[int, int]]) -> set[int]:
    return {instant for start, end in drawn for instant in range(start, end)}


def instants_of(intervals: Intervals) -> set[int]:
    return instants([(int(start), int(end)) for start, end in intervals])


def is_proper(intervals: Intervals) -> bool:
    """Disjoint, sorted, nothing empty."""
    return bool((intervals[:, 1] > intervals[:, 0]).all() and (intervals[1:, 0] >= intervals[:-1, 1]).all())


@given(pairs)
def test_a_union_covers_exactly_what_its_intervals_cover(drawn: list[tuple[int, int]]) -> None:
    merged = intervals_of(drawn)
    assert instants_of(merged) == instants(drawn)
    assert is_proper(merged)
    assert (merged[1:, 0] > merged[:-1, 1]).all(), "touching intervals are one"
    assert total(merged) == len(instants(drawn))


@given(pairs, pairs)
def test_intersection_and_difference_are_those_of_the_instants(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    left, right = intervals_of(first), intervals_of(second)
    both, only = intersect(left, right), subtract(left, right)
    assert instants_of(both) == instants(first) & instants(second)
    assert instants_of(only) == instants(first) - instants(second)
    assert is_proper(both)
    assert is_proper(only)
    assert total(both) + total(only) == total(left)
    assert instants_of(union_of((left, right, EMPTY))) == instants(first) | instants(second)


@given(pairs, moments, moments)
def test_a_clip_keeps_what_is_inside(drawn: list[tuple[int, int]], start: int, end: int) -> None:
    assert instants_of(clip(intervals_of(drawn), start, end)) == instants(drawn) & set(range(start, end))


@given(pairs, pairs)
def test_lengths_within_windows_need_no_window_to_be_sorted(
    drawn: list[tuple[int, int]], windows: list[tuple[int, int]]
) -> None:
    found = total_within(intervals_of(drawn), np.array(windows, np.int64).reshape(-1, 2))
    assert found.tolist() == [len(instants(drawn) & set(range(*window))) for window in windows]


@given(st.lists(pairs, max_size=6), moments, moments)
def test_a_partition_gives_each_instant_to_the_first_that_covers_it(
    drawn: list[list[tuple[int, int]]], start: int, end: int
) -> None:
    sets = [intervals_of(one) for one in drawn]
    parts = partition(sets, (start, end))
    expected: list[set[int]] = [set() for _ in range(len(sets) + 1)]
    for instant in range(start, end):
        first = next((i for i, one in enumerate(drawn) if instant in instants(one)), len(drawn))
        expected[first].add(instant)
    assert [instants_of(part) for part in parts] == expected
    assert sum(total(part) for part in parts) == max(end - start, 0)
    everywhere = partition(sets)
    assert instants_of(union_of(everywhere)) == {i for one in drawn for i in instants(one)}


def test_nanoseconds_of_the_epoch_are_exact() -> None:
    """Absolute times need 61 bits; a float has 53."""
    now = 1_790_857_026_000_000_001
    intervals = union(np.array([now, now + 1], np.int64), np.array([now + 1, now + 3], np.int64))
    assert intervals.tolist() == [[now, now + 3]]
    assert total_within(intervals, np.array([[now + 2, now + 9]], np.int64)).tolist() == [1]


def test_the_complement_of_nothing_is_everything_and_back() -> None:
    assert len(complement(EMPTY)) == 1
    assert len(complement(complement(EMPTY))) == 0
