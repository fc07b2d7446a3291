"""Percentiles, and ratios of times with an interval."""

from collections.abc import Sequence

import numpy as np

__all__ = ["least_effect", "percentile", "ratio_of_medians", "weighted_percentile"]


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
