"""Student's t against published tables, and the interval of a mean."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.measure.statistics import mean_with_interval, student_t_cdf, student_t_quantile

# Two-sided 95% and 99% points, and the one-sided 99.95% point, of the tables in any textbook.
TABLE = {
    1: (12.706, 63.657, 636.619),
    2: (4.303, 9.925, 31.599),
    3: (3.182, 5.841, 12.924),
    4: (2.776, 4.604, 8.610),
    7: (2.365, 3.499, 5.408),
    10: (2.228, 3.169, 4.587),
    30: (2.042, 2.750, 3.646),
    120: (1.980, 2.617, 3.373),
}


@pytest.mark.parametrize("degrees", TABLE)
def test_quantiles_are_those_of_the_table(degrees: int) -> None:
    found = [student_t_quantile(share, degrees) for share in (0.975, 0.995, 0.9995)]
    assert found == pytest.approx(TABLE[degrees], abs=6e-4, rel=1e-5)


def test_one_and_two_degrees_have_a_closed_form() -> None:
    for share in (0.6, 0.9, 0.99, 0.999999):
        assert student_t_quantile(share, 1) == pytest.approx(math.tan(math.pi * (share - 0.5)), rel=1e-9)
        two = (2 * share - 1) * math.sqrt(2 / (4 * share * (1 - share)))
        assert student_t_quantile(share, 2) == pytest.approx(two, rel=1e-9)


@given(st.floats(1e-6, 1 - 1e-6), st.integers(1, 300))
def test_the_quantile_undoes_the_distribution(share: float, degrees: int) -> None:
    t = student_t_quantile(share, degrees)
    assert student_t_cdf(t, degrees) == pytest.approx(share, rel=1e-8, abs=1e-12)
    assert student_t_quantile(1 - share, degrees) == pytest.approx(-t, rel=1e-6, abs=1e-9)


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    draw = random.Random(1)
    trials = 4000
    covered = 0
    for _ in range(trials):
        _, low, high = mean_with_interval([draw.gauss(3.0, 2.0) for _ in range(4)], confidence=0.9)
        covered += low < 3.0 < high
    assert abs(covered / trials - 0.9) < 0.02


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert mean_with_interval([0.5, 0.5, 0.5]) == (0.5, 0.5, 0.5)
