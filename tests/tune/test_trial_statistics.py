"""The interval of a trial covers what is true, and what it decides follows from it. Simulated blocks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.tune.trial_statistics import Noise, judge, noise_of, order_of, speed_ratio, units_needed

ONE_UNIT, TWO_UNITS = order_of(1), order_of(2)


def a_against_a(seed: int, *, drift: float, outliers: float, ratio: float = 1.0) -> bool:
    """One trial of two looks with lognormal blocks of 1.5%; whether its interval covers ``ratio``."""
    generator = np.random.default_rng(seed)
    order = TWO_UNITS
    logs = generator.normal(0, 0.015, 8) + drift * np.arange(8)
    logs -= (generator.random(8) < outliers) * generator.exponential(0.1, 8)
    logs += math.log(ratio) * np.asarray([side == "B" for side in order])
    speeds = [1000 * math.exp(one) for one in logs]
    for blocks in (4, 8):
        noise = noise_of(
            [speed for side, speed in zip(order[:blocks], speeds[:blocks], strict=True) if side == "A"]
        )
        decided = judge(order[:blocks], speeds[:blocks], looks=2, confidence=0.95, noise=noise)
        if decided.state != "undecided":
            break
    return decided.measured.low <= ratio <= decided.measured.high


@pytest.mark.parametrize("drift", [0.0, 0.003, 0.03])
@pytest.mark.parametrize("outliers", [0.0, 0.1])
@pytest.mark.parametrize("ratio", [1.0, 1.2])
def test_the_interval_covers_the_true_ratio_in_54_of_60_trials(
    drift: float, outliers: float, ratio: float
) -> None:
    covered = [a_against_a(seed, drift=drift, outliers=outliers, ratio=ratio) for seed in range(300)]
    assert min(sum(covered[start : start + 60]) for start in range(0, 300, 60)) >= 54
    assert sum(covered) >= 0.93 * 300


def test_equal_sides_are_seldom_called_faster() -> None:
    wrong = 0
    for seed in range(300):
        speeds = list(1000 * np.exp(np.random.default_rng(seed).normal(0, 0.02, 8)))
        wrong += (
            judge(TWO_UNITS, speeds, looks=2, confidence=0.95, noise=noise_of(speeds[::3])).state == "faster"
        )
    assert wrong <= 9


@given(st.floats(-0.2, 0.2), st.floats(0.5, 2.0))
def test_a_linear_drift_does_not_move_the_ratio(drift: float, ratio: float) -> None:
    speeds = [
        1000 * math.exp(drift * place) * (ratio if side == "B" else 1) for place, side in enumerate(ONE_UNIT)
    ]
    assert speed_ratio(ONE_UNIT, speeds, confidence=0.95).ratio == pytest.approx(ratio)
    longer = [
        1000 * math.exp(drift * place) * (ratio if side == "B" else 1) for place, side in enumerate(TWO_UNITS)
    ]
    measured = speed_ratio(TWO_UNITS, longer, confidence=0.95)
    assert measured.low == pytest.approx(ratio)
    assert measured.high == pytest.approx(ratio)


def test_what_repeats_with_the_length_of_a_unit_moves_no_ratio_of_two() -> None:
    for slow in range(4):
        speeds = [900.0 if place % 4 == slow else 1000.0 for place in range(8)]
        assert speed_ratio(TWO_UNITS, speeds, confidence=0.95).ratio == pytest.approx(1)
        assert speed_ratio(ONE_UNIT, speeds[:4], confidence=0.95).ratio != pytest.approx(1)


@given(st.lists(st.floats(1.0, 1e6), min_size=4, max_size=4))
def test_the_interval_holds_the_ratio_and_turns_over_with_the_sides(speeds: list[float]) -> None:
    measured = speed_ratio(ONE_UNIT, speeds, confidence=0.95)
    assert measured.low <= measured.ratio <= measured.high
    turned = speed_ratio(ONE_UNIT, [1 / speed for speed in speeds], confidence=0.95)
    assert turned.ratio == pytest.approx(1 / measured.ratio)


def test_the_interval_of_four_blocks_is_students_with_two_degrees_of_freedom() -> None:
    # Deviations of one side 1%, of the other 3%: pooled sqrt((2 * 0.01^2 / ... )) by hand.
    logs = [0.01, 0.13, 0.07, -0.01]
    pooled = math.sqrt((2 * 0.01**2 + 2 * 0.03**2) / 2)
    measured = speed_ratio(ONE_UNIT, [math.exp(one) for one in logs], confidence=0.95)
    assert measured.deviation == pytest.approx(pooled)
    assert math.log(measured.high / measured.ratio) == pytest.approx(4.302652730 * pooled)
    assert math.log(measured.ratio) == pytest.approx(0.1)


def speeds(ratio: float, deviation: float) -> list[float]:
    high, low = math.exp(deviation), math.exp(-deviation)
    return [1000 * high, 1000 * ratio * low, 1000 * ratio * high, 1000 * low]


@pytest.mark.parametrize(
    ("ratio", "deviation", "state"),
    [(1.2, 0.001, "faster"), (0.9, 0.001, "slower"), (1.0, 0.0005, "no gain"), (1.05, 0.03, "undecided")],
)
def test_each_state_is_reached(ratio: float, deviation: float, state: str) -> None:
    blocks = speeds(ratio, deviation)
    assert judge(ONE_UNIT, blocks, looks=2, confidence=0.95, noise=noise_of(blocks[::3])).state == state


def test_what_is_below_the_least_effect_is_not_kept_however_sure_it_is() -> None:
    blocks = speeds(1.02, 0.0001)
    quiet = judge(ONE_UNIT, blocks, looks=1, confidence=0.95, noise=Noise())
    assert quiet.state == "faster"
    # Blocks of unchanged configurations deviated by 3% earlier: 6% is the least that counts.
    noisy = judge(ONE_UNIT, blocks, looks=1, confidence=0.95, noise=Noise(0.03**2 * 10, 10))
    assert noisy.state == "undecided"
    assert noisy.least_effect == pytest.approx(0.06)
    assert "least effect" in noisy.why


def test_a_machine_noisier_than_the_effect_is_told_how_many_blocks_it_would_take() -> None:
    blocks = speeds(1.05, 0.03)
    found = judge(ONE_UNIT, blocks, looks=2, confidence=0.95, noise=noise_of(blocks[::3]))
    units = units_needed(math.log(1.05), found.measured.deviation, looks=2, confidence=0.95)
    assert units is not None
    assert f"about {4 * units} blocks would be needed" in found.why
    assert units_needed(math.log(1.05), found.measured.deviation / 4, looks=2, confidence=0.95) < units


def test_noise_adds_up_over_trials() -> None:
    total = noise_of([1.0, math.e]) + noise_of([1.0, math.e]) + noise_of([5.0])
    assert total.freedom == 2
    assert total.deviation == pytest.approx(math.sqrt(0.5))
    assert Noise().deviation is None
