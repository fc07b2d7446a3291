"""Percentiles, ratios of times with an interval, and the mean of a few numbers with an interval."""

import functools
import math
from collections.abc import Sequence

import numpy as np

__all__ = [
    "least_effect",
    "mean_with_interval",
    "percentile",
    "ratio_of_medians",
    "student_t_cdf",
    "student_t_quantile",
    "weighted_percentile",
]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, interpolated linearly. At least one value."""
    assert len(values) > 0
    assert 0 <= share <= 1
    return float(np.quantile(np.asarray(values, dtype=np.float64), share))


def weighted_percentile(values: Sequence[float], weights: Sequence[int], share: float) -> float:
    """As `percentile`, each value standing for `weights` observations of it."""
    assert len(values) == len(weights)
    return percentile(list(np.repeat(np.asarray(values, dtype=np.float64), weights)), share)


def ratio_of_medians(
    a: Sequence[float],
    b: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """median(b) / median(a), with the low and high end of its bootstrap interval.

    With `a` our times and `b` a peer's, above 1 means that we are faster. Both are resampled with
    replacement (percentile bootstrap); the seed is fixed so that the same times give the same interval.

    Args:
        a: seconds, or any positive quantity.
        b: the same quantity of the other side.
        confidence: coverage of the interval.
        resamples: bootstrap samples.
        seed: of the resampling.
    """
    assert len(a) > 0
    assert len(b) > 0
    generator = np.random.default_rng(seed)
    medians = []
    for side in (a, b):
        values = np.asarray(side, dtype=np.float64)
        assert bool((values > 0).all()), "a ratio of medians needs positive values"
        picks = generator.integers(0, values.size, size=(resamples, values.size))
        medians.append(np.median(values[picks], axis=1))
    low, high = np.quantile(medians[1] / medians[0], [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(np.median(b) / np.median(a)), float(low), float(high)


def least_effect(a_against_a: float) -> float:
    """The least relative effect that counts: 1%, or twice the deviation of the same thing measured twice."""
    return max(0.01, 2 * abs(a_against_a))


def mean_with_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean of at least two values, with the ends of its two-sided Student-t interval.

    For independent values of a normal distribution whose deviation is not known.
    """
    count = len(values)
    assert count >= 2, "one value has no spread"
    mean = math.fsum(values) / count
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = student_t_quantile((1 + confidence) / 2, count - 1) * deviation / math.sqrt(count)
    return mean, mean - half, mean + half


def student_t_cdf(t: float, degrees: float) -> float:
    """Probability that Student's t with ``degrees`` (>= 1) degrees of freedom is at most ``t``.

    ``1 - I_x(degrees/2, 1/2) / 2`` with ``x = degrees / (degrees + t^2)`` for t >= 0 (Abramowitz and Stegun 26.7.1).
    """
    assert degrees >= 1
    tail = _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5) / 2
    return 1 - tail if t >= 0 else tail


@functools.lru_cache(maxsize=1024)
def student_t_quantile(probability: float, degrees: float) -> float:
    """The t that Student's t with ``degrees`` degrees of freedom stays below with ``probability`` (0 to 1, exclusive).

    By bisection of :func:`student_t_cdf`; right to about 1e-9 of its value.
    """
    assert 0 < probability < 1
    if probability < 0.5:
        return -student_t_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while student_t_cdf(high, degrees) < probability:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if student_t_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b) for 0 < x <= 1."""
    if x >= 1:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # The continued fraction converges quickly below the mean; above it the mirrored function is taken.
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _beta_fraction(x, a, b) / a
    return 1 - math.exp(log_front) * _beta_fraction(1 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Continued fraction of the incomplete beta function (Abramowitz and Stegun 26.5.8), by Lentz's method."""
    tiny = 1e-300
    numerator, denominator = 1.0, 1 - (a + b) * x / (a + 1)
    denominator = 1 / (denominator if abs(denominator) > tiny else tiny)
    value = denominator
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for step in (even, odd):
            denominator = 1 + step * denominator
            denominator = 1 / (denominator if abs(denominator) > tiny else tiny)
            numerator = 1 + step / numerator
            numerator = numerator if abs(numerator) > tiny else tiny
            value *= numerator * denominator
        if abs(numerator * denominator - 1) < 1e-15:
            break
    return value
