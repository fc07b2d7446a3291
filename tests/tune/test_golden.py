"""Golden section: few trials, none twice, and the peak of whatever has one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.catalogue import Knob
from drivetrain.tune.golden import axis_of, golden_section

WORKERS = Knob("data.num_workers", 1, 16, whole=True, scale="log")
BUCKET = Knob("overlap.bucket_size_mb", 0.1, 200.0, scale="log")
MICRO = Knob("training.micro_batch_size", 1, 1024, whole=True, scale="log")
LAYERS = Knob("memory.recompute_num_layers", 1, 1000, whole=True)


@given(st.floats(0.2, 150.0), st.integers(6, 12))
def test_a_single_peak_is_found_on_the_knobs_own_scale(peak: float, trials: int) -> None:
    asked: list[float] = []

    def measure(value: float) -> float:
        asked.append(value)
        return 1.0 - math.log(value / peak) ** 2

    best, gain = golden_section(BUCKET, 0.1, measure, trials=trials)
    assert len(asked) <= trials
    width = math.log(2000) * 0.618 ** (trials - 1)
    if gain > 0:
        assert abs(math.log(best / peak)) <= width + 0.02


@given(st.integers(1, 16), st.integers(1, 8))
def test_whole_numbers_are_tried_once_each_and_the_best_that_was_seen_is_the_answer(
    peak: int, trials: int
) -> None:
    seen: dict[float, float] = {}

    def measure(value: float) -> float:
        assert value == int(value)
        assert value not in seen
        seen[value] = -abs(math.log(value / peak)) + 1
        return seen[value]

    best, gain = golden_section(WORKERS, 1, measure, trials=trials)
    assert len(seen) <= trials
    assert gain == max([0.0, *seen.values()])
    assert best == 1 or seen[best] == gain


@given(st.lists(st.integers(1, 1024), min_size=2, max_size=12, unique=True), st.data())
def test_only_legal_values_are_tried_where_not_every_number_is_one(
    legal: list[int], data: st.DataObject
) -> None:
    values = sorted(legal)
    start = data.draw(st.sampled_from(values))
    peak = data.draw(st.sampled_from(values))
    seen: list[float] = []

    def measure(value: float) -> float:
        assert value in values
        assert value not in seen
        assert value != start
        seen.append(value)
        return (
            abs(values.index(start) - values.index(peak)) - abs(values.index(int(value)) - values.index(peak))
        ) / 9

    best, _ = golden_section(MICRO, start, measure, trials=12, values=values)
    assert abs(values.index(int(best)) - values.index(peak)) <= 1


def test_where_nothing_is_better_the_start_stays() -> None:
    assert golden_section(WORKERS, 4, lambda _value: -0.1, trials=5) == (4, 0.0)
    assert golden_section(WORKERS, 4, lambda _value: 0.0, trials=5) == (4, 0.0)


def test_what_cannot_be_had_is_no_trial_and_the_search_goes_on_where_it_began() -> None:
    best, gain = golden_section(WORKERS, 1, lambda value: None if value > 4 else 0.1 * value, trials=3)
    assert (best, gain) == (4, pytest.approx(0.4))

    def few_layers_do_not_fit(value: float) -> float | None:
        return None if value < 9 else -0.01 * value

    asked: list[float] = []

    def measure(value: float) -> float | None:
        asked.append(value)
        found = few_layers_do_not_fit(value)
        return None if found is None else found + 0.12

    # Both of the first places (5 and 8 of 12) need too much: the value that the run has lies above them.
    best, _ = golden_section(LAYERS, 12, measure, trials=3, values=range(1, 13))
    assert best in (9, 10)
    assert all(value > 4 for value in asked), "nothing far below the start was asked for"


def test_a_flat_top_ends_the_search_and_a_peak_that_shows_does_not() -> None:
    def tries(height: float, noise: float) -> int:
        asked: list[float] = []

        def measure(value: float) -> float:
            asked.append(value)
            return height * (1 - abs(math.log(value / 5.0)) / math.log(50))

        golden_section(BUCKET, 0.1, measure, trials=8, error=lambda _value: noise)
        return len(asked)

    assert tries(0.4, 0.0001) == 8
    assert tries(0.4, 0.2) == 3, "0.2, give or take: nothing can be told"
    assert tries(0.008, 0.0001) < 8, "a hundredth at most is an effect that never counts"


def test_no_trial_is_no_search() -> None:
    assert golden_section(WORKERS, 2, lambda _value: 1.0, trials=0) == (2, 0.0)


def test_a_line_of_two_legal_values_at_least() -> None:
    assert axis_of(MICRO, (2, 8)).number(0.6) == 8
    with pytest.raises(AssertionError, match="nothing can be searched"):
        axis_of(MICRO, (2,))
