"""Two knobs that interact, searched together: optuna's tree-structured Parzen estimator over few and noisy trials.

Bergstra et al. 2011 (NeurIPS 24). The sampler has a declared seed and is told nothing but what was measured, in its
order: whoever runs the search again with the same results gets the same proposals. optuna is optional
(``drivetrain[tune]``) and imported here when a pair is searched, never before.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drivetrain.catalogue import Knob
from drivetrain.tune.golden import Axis, axis_of

__all__ = ["JointSampler", "Plane", "joint_search", "optuna_sampler", "optuna_version"]

SEED = 1
_AT_RANDOM = 3
"""Proposals before the first that follows from the others; the start is one more that is known."""
_ASKED_PER_TRIAL = 20
"""Proposals that repeat known ones cost no trial, and are given up after so many for each trial."""

Pair = tuple[float, float]


@dataclass(frozen=True)
class Plane:
    """The places of two knobs' numbers, each from 0 to 1 on its own line."""

    axes: tuple[Axis, Axis]

    @classmethod
    def of(cls, knobs: Sequence[Knob], values: Sequence[Sequence[float] | None]) -> "Plane":
        """Of two knobs, with the legal numbers of each, or None where all of its range are."""
        first, second = (axis_of(knob, legal) for knob, legal in zip(knobs, values, strict=True))
        return cls((first, second))

    def numbers(self, places: Sequence[float]) -> Pair:
        """The legal numbers next to ``places``, each from 0 to 1."""
        first, second = (
            axis.number(axis.low + place * (axis.high - axis.low))
            for axis, place in zip(self.axes, places, strict=True)
        )
        return first, second

    def places(self, numbers: Pair) -> Pair:
        """Where ``numbers`` lie, each from 0 to 1."""
        first, second = (
            min(max((axis.place(number) - axis.low) / (axis.high - axis.low), 0.0), 1.0)
            for axis, number in zip(self.axes, numbers, strict=True)
        )
        return first, second


class JointSampler(Protocol):
    """Proposes places in the unit square by what it was told."""

    def ask(self) -> Pair:
        """The next place to try."""
        ...

    def tell(self, place: Pair, gain: float) -> None:
        """What was found at a place, be it the one that was asked for or another; higher is better."""
        ...


def joint_search(
    plane: Plane,
    start: Pair,
    measure: Callable[[Pair], float | None],
    *,
    trials: int,
    sampler: JointSampler,
) -> tuple[Pair, float]:
    """The best pair that was measured, and what was measured of it.

    Args:
        start: the pair now; what ``measure`` says is relative to it, and it is 0 there.
        measure: pair → logarithm of the ratio against ``start``; None: it cannot be had. That is no trial, and the
            sampler is told that it is worse than everything measured.
        trials: most pairs that are measured.

    Returns:
        ``(start, 0.0)`` where nothing was better.
    """
    found: dict[Pair, float | None] = {start: 0.0}
    sampler.tell(plane.places(start), 0.0)
    left, asked = trials, 0
    while left > 0 and asked < _ASKED_PER_TRIAL * trials:
        asked += 1
        place = sampler.ask()
        pair = plane.numbers(place)
        if pair not in found:
            found[pair] = measure(pair)
            left -= found[pair] is not None
        gain = found[pair]
        sampler.tell(place, _WORST if gain is None else gain)
    had = {pair: gain for pair, gain in found.items() if gain is not None}
    best = max(had, key=lambda pair: (had[pair], pair == start))
    return best, had[best]


_WORST = -math.log(1e6)
"""What a pair that cannot be had counts as: a million times slower."""


def optuna_version() -> str | None:
    """Of the optuna that can be imported; None: there is none."""
    try:
        import optuna
    except ImportError:
        return None
    version: str = optuna.__version__
    return version


def optuna_sampler(seed: int = SEED) -> JointSampler:
    """A sampler of its own study, in memory.

    Raises:
        ImportError: optuna is not installed.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return _OptunaSampler(optuna, seed)


class _OptunaSampler:
    def __init__(self, optuna: Any, seed: int) -> None:
        self._optuna = optuna
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_AT_RANDOM + 1)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        place = optuna.distributions.FloatDistribution(0.0, 1.0)
        self._space = {"first": place, "second": place}
        self._pending: Any = None

    def ask(self) -> Pair:
        self._pending = self._study.ask(self._space)
        return self._pending.params["first"], self._pending.params["second"]

    def tell(self, place: Pair, gain: float) -> None:
        if self._pending is not None:
            self._study.tell(self._pending, gain)
            self._pending = None
            return
        params = {"first": place[0], "second": place[1]}
        self._study.add_trial(
            self._optuna.trial.create_trial(params=params, distributions=self._space, value=gain)
        )
