"""The rule of choice: the simplest that no other beats for certain."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.engine.ops.tuned_file import Candidate
from drivetrain.engine.ops_tuning.choice import LEAST_GAIN, decide, least_and_spread


def timed(backend: str, seconds: float, spread: float = 0.0) -> Candidate:
    return Candidate(backend=backend, seconds=seconds, spread=spread)


def chosen(*candidates: Candidate) -> str:
    decision = decide(candidates)
    assert decision is not None
    return decision.backend


@pytest.mark.parametrize(
    ("seconds", "choice"),
    [
        ((1.0, 0.5, 0.6), "b"),
        ((1.0, 0.98, 0.6), "c"),
        ((1.0, 0.98, 0.98), "a"),
        ((1.0, 0.96, 0.94), "b"),  # c is less than 3% faster than b, which is kept
        ((1.0, 1.5, 0.99), "a"),
        ((1.0, 0.9, 0.5), "c"),
    ],
)
def test_a_simpler_one_is_kept_unless_another_is_faster_by_three_percent(
    seconds: tuple[float, float, float], choice: str
) -> None:
    assert chosen(*map(timed, "abc", seconds)) == choice


def test_what_lies_within_the_noise_is_no_gain() -> None:
    assert chosen(timed("simple", 1.0, 0.5), timed("other", 0.8)) == "simple"
    assert chosen(timed("simple", 1.0), timed("other", 0.8, 0.5)) == "simple"
    assert chosen(timed("simple", 1.0, 0.5), timed("other", 0.7, 0.5)) == "other"


def test_a_call_of_a_tenth_of_the_time_is_chosen_on_a_machine_that_others_use() -> None:
    assert chosen(timed("simple", 32.2, 0.93), timed("other", 3.47, 0.2)) == "other"


def test_half_of_the_scatter_is_what_the_least_time_is_too_high_by() -> None:
    generator = random.Random(0)
    too_high, scatter = [], []
    for _ in range(2000):
        least, spread = least_and_spread([1.0 + generator.expovariate(2.0) for _ in range(9)])
        too_high.append(least - 1.0)
        scatter.append(spread * least)
    assert 0.8 < (sum(scatter) / 2) / sum(too_high) < 1.4


def test_what_was_rejected_is_never_chosen() -> None:
    fast = Candidate(backend="fast", rejected="wrong: output 0", seconds=0.1, spread=0.0)
    assert chosen(timed("simple", 1.0), fast) == "simple"
    assert decide([fast, Candidate(backend="untimed")]) is None


@given(
    times=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=5),
    spread=st.floats(0.0, 0.5),
)
def test_the_choice_is_as_fast_as_each_simpler_one_or_faster_for_certain(
    times: list[float], spread: float
) -> None:
    candidates = [timed(str(number), seconds, spread) for number, seconds in enumerate(times)]
    choice = times[int(chosen(*candidates))]
    first = times[0]
    assert choice == first or choice < first * (1 - max(LEAST_GAIN, spread / 2))
    assert chosen(*candidates, timed("again", choice)) == chosen(*candidates)


def test_spread_says_whether_the_least_time_was_found_again() -> None:
    assert least_and_spread([9.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0]) == (1.0, 0.0)
    assert least_and_spread([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]) == (1.0, 1.0)
    assert least_and_spread([1.0]) == (1.0, 0.0)
