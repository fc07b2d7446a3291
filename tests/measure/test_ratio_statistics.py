"""Percentiles and ratios with an interval."""

import numpy as np
import pytest

from drivetrain.measure.statistics import least_effect, percentile, ratio_of_medians, weighted_percentile


def test_percentiles_interpolate() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile([7.0], 0.9) == 7.0
    assert weighted_percentile([1.0, 5.0], [9, 1], 0.5) == 1.0
    with pytest.raises(AssertionError):
        percentile([], 0.5)


def test_the_ratio_is_the_second_over_the_first() -> None:
    ratio, low, high = ratio_of_medians([1.0, 1.1, 0.9], [2.0, 2.2, 1.8])
    assert ratio == 2.0
    assert low <= 2.0 <= high


def test_the_interval_is_reproducible_and_narrows_with_more_times() -> None:
    generator = np.random.default_rng(1)
    a, b = list(generator.normal(1, 0.05, 200)), list(generator.normal(1.2, 0.05, 200))
    assert ratio_of_medians(a, b) == ratio_of_medians(a, b)
    _, low, high = ratio_of_medians(a, b)
    _, few_low, few_high = ratio_of_medians(a[:10], b[:10])
    assert 1 < low < 1.2 * 1.02
    assert high - low < few_high - few_low


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        a, b = generator.normal(1, 0.03, 20), generator.normal(1.05, 0.03, 20)
        _, low, high = ratio_of_medians(list(a), list(b), resamples=500)
        covered += low <= 1.05 <= high
    assert 176 <= covered <= 200


def test_equal_times_have_no_spread() -> None:
    assert ratio_of_medians([2.0] * 5, [2.0] * 7) == (1.0, 1.0, 1.0)


def test_times_of_zero_are_refused() -> None:
    with pytest.raises(AssertionError):
        ratio_of_medians([0.0, 1.0], [1.0])


def test_the_least_effect_is_a_percent_or_twice_the_noise() -> None:
    assert least_effect(0.001) == 0.01
    assert least_effect(-0.026) == 0.052
