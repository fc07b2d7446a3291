"""Two knobs that interact: proposals follow from the declared seed and from what was measured, nothing else."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from drivetrain.catalogue import Knob
from drivetrain.tune.joint_search import Pair, Plane, joint_search, optuna_sampler, optuna_version

MICRO = Knob("training.micro_batch_size", 1, 1024, whole=True, scale="log")
LAYERS = Knob("memory.recompute_num_layers", 1, 1000, whole=True)
SIZES, DEPTHS = (1, 2, 4, 8, 16), tuple(range(1, 13))
PLANE = Plane.of((MICRO, LAYERS), (SIZES, DEPTHS))
pytestmark = pytest.mark.skipif(optuna_version() is None, reason="optuna is not installed")


def fits(pair: Pair) -> bool:
    """A larger micro-batch needs more layers to be recomputed."""
    return pair[0] * (14 - pair[1]) <= 40


def gain(pair: Pair) -> float:
    """Larger passes are faster, and each recomputed layer costs: the best is (8, 9), and one at a time misses it."""
    return 0.1 * math.log2(pair[0]) - 0.02 * (pair[1] - 1)


def searched(
    measure: Callable[[Pair], float | None] = lambda pair: gain(pair) if fits(pair) else None,
    *,
    start: Pair = (2, 1),
    trials: int = 12,
    seed: int = 1,
) -> tuple[Pair, float, list[Pair]]:
    asked: list[Pair] = []

    def counted(pair: Pair) -> float | None:
        asked.append(pair)
        return measure(pair)

    best, found = joint_search(PLANE, start, counted, trials=trials, sampler=optuna_sampler(seed))
    return best, found, asked


def test_the_same_results_give_the_same_proposals() -> None:
    first, second = searched(), searched()
    assert first == second
    assert first[2] != searched(seed=2)[2]


def test_a_search_that_is_cut_short_and_run_again_goes_on_as_it_would_have() -> None:
    _, _, whole = searched()
    known: dict[Pair, float | None] = {}

    def interrupted(pair: Pair) -> float | None:
        if pair not in known and len(known) == 5:
            raise KeyboardInterrupt
        known[pair] = gain(pair) if fits(pair) else None
        return known[pair]

    with pytest.raises(KeyboardInterrupt):
        searched(interrupted)
    again: list[Pair] = []

    def resumed(pair: Pair) -> float | None:
        if pair not in known:
            again.append(pair)
        return gain(pair) if fits(pair) else None

    assert searched(resumed)[2] == whole
    assert again == whole[5:]


def test_pairs_are_legal_and_none_is_tried_twice_and_what_cannot_be_had_is_no_trial() -> None:
    best, found, asked = searched()
    assert len(set(asked)) == len(asked)
    assert (2, 1) not in asked
    assert all(size in SIZES and depth in DEPTHS for size, depth in asked)
    assert sum(fits(pair) for pair in asked) <= 12
    assert fits(best)
    assert found == gain(best) > gain((2, 1)), "better than where it began"


def test_it_finds_what_one_knob_after_the_other_cannot() -> None:
    """From (2, 1) no other size fits at one layer, and at that size no more layers are any better."""
    alone = [(size, 1) for size in SIZES if fits((size, 1))] + [(2, depth) for depth in DEPTHS]
    best, _, _ = searched(trials=16)
    assert gain(best) > max(gain(pair) for pair in alone)


def test_where_nothing_is_better_the_start_stays() -> None:
    best, found, asked = searched(lambda _pair: -0.1, trials=4)
    assert (best, found, len(asked)) == ((2, 1), 0.0, 4)
    best, found, asked = searched(lambda _pair: None, trials=4)
    assert (best, found) == ((2, 1), 0.0)
    assert len(asked) < len(SIZES) * len(DEPTHS), "proposals that cost nothing end, too"


def test_continuous_knobs_lie_on_their_own_scales() -> None:
    bucket = Knob("overlap.bucket_size_mb", 0.1, 200.0, scale="log")
    plane = Plane.of((bucket, LAYERS), (None, DEPTHS))
    assert plane.numbers((0.0, 0.0)) == (0.1, 1)
    assert plane.numbers((1.0, 1.0)) == (200.0, 12)
    assert plane.places((math.sqrt(0.1 * 200), 12))[0] == pytest.approx(0.5)


def test_without_optuna_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: dict[str, Any] = {"optuna": None}
    monkeypatch.setitem(sys.modules, "optuna", missing["optuna"])
    assert optuna_version() is None
