"""Golden section: few trials, none twice, and the peak of whatever has one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.catalogue import Knob
from drivetrain.tune.golden import golden_section

WORKERS = Knob("data.num_workers", 1, 16, whole=True, scale="log")
BUCKET = Knob("overlap.bucket_size_mb", 0.1, 200.0, scale="log")


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


def test_where_nothing_is_better_the_start_stays() -> None:
    assert golden_section(WORKERS, 4, lambda _value: -0.1, trials=5) == (4, 0.0)
    assert golden_section(WORKERS, 4, lambda _value: 0.0, trials=5) == (4, 0.0)


def test_values_that_cannot_be_had_are_worse_than_anything() -> None:
    best, gain = golden_section(WORKERS, 1, lambda value: None if value > 4 else 0.1 * value, trials=6)
    assert (best, gain) == (4, pytest.approx(0.4))


def test_no_trial_is_no_search() -> None:
    assert golden_section(WORKERS, 2, lambda _value: 1.0, trials=0) == (2, 0.0)
