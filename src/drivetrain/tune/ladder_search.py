"""The search of a knob, or of two that interact, by a ladder: each value is a step, and one of them may be kept."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.catalogue import Knob, StepEstimate
from drivetrain.config import RunConfig
from drivetrain.tune.candidates import Candidate
from drivetrain.tune.golden import golden_section
from drivetrain.tune.joint_search import JointSampler, Plane, joint_search
from drivetrain.tune.ladder_records import Rung, in_words
from drivetrain.tune.ladder_steps import Steps
from drivetrain.tune.moves import Change, changed

__all__ = ["KnobSearch"]

Numbers = tuple[float, ...]
"""One of each knob that is searched."""


@dataclass
class _Tried:
    """What became of values that were tried, in their order."""

    made: dict[Numbers, tuple[dict[str, Any], Change, tuple[RunConfig, Path]]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def error(self, numbers: Numbers) -> float:
        """Standard error of the logarithm of a measured ratio: that of two means of half its blocks each."""
        step = self.made[numbers][0]
        measured = step["measured"]
        assert measured is not None
        return float(measured["deviation"]) * math.sqrt(4 / len(step["blocks"]))


class KnobSearch:
    """Searches knobs from the configuration of a rung.

    Args:
        steps: makes the trials.
        sampler: proposes pairs; why there is none, where there is none.
    """

    def __init__(self, steps: Steps, sampler: Callable[[], JointSampler | str]) -> None:
        self._steps = steps
        self._sampler = sampler

    def search(self, current: Rung, candidate: Candidate) -> Rung:
        """The rung to go on from."""
        if candidate.partner is None:
            return self._one(current, candidate)
        sampler = self._sampler()
        if isinstance(sampler, str):
            first, second = candidate.alone
            self._steps.view.findings.append(
                f"{candidate.key}: searched one after the other, which misses what is best of one at another value of "
                f"the other: {sampler}"
            )
            return self._one(self._one(current, first), second)
        return self._both(current, candidate, sampler)

    def _one(self, current: Rung, candidate: Candidate) -> Rung:
        knob = candidate.knob
        assert knob is not None
        start = self._start(current, candidate, knob)
        if start is None:
            return current
        values = self._values(current, knob)
        if values is not None and len(values) < 2:
            self._not_searched(candidate, f"{knob.field} has one legal value here")
            return current
        self._say(candidate, [knob], (start,))
        tried = _Tried()
        golden_section(
            knob,
            start,
            lambda value: self._measure(current, candidate, [knob], (value,), tried),
            trials=self._steps.bench.settings.knob_trials,
            values=values,
            error=lambda value: tried.error((value,)),
        )
        return self._keep_best(current, candidate, [knob], tried)

    def _both(self, current: Rung, candidate: Candidate, sampler: JointSampler) -> Rung:
        assert candidate.knob is not None
        assert candidate.partner is not None
        knobs = [candidate.knob, candidate.partner[1]]
        starts = [self._start(current, candidate, knob) for knob in knobs]
        values = [self._values(current, knob) for knob in knobs]
        if any(legal is not None and len(legal) < 2 for legal in values):
            first, second = candidate.alone
            return self._one(self._one(current, first), second)
        if starts[0] is None or starts[1] is None:
            return current
        start = (starts[0], starts[1])
        self._say(candidate, knobs, start)
        tried = _Tried()
        joint_search(
            Plane.of(knobs, values),
            start,
            lambda numbers: self._measure(current, candidate, knobs, numbers, tried),
            trials=2 * self._steps.bench.settings.knob_trials,
            sampler=sampler,
        )
        return self._keep_best(current, candidate, knobs, tried)

    def _start(self, current: Rung, candidate: Candidate, knob: Knob) -> float | None:
        number = knob.number(current.config)
        if number is None or not knob.low <= number <= knob.high:
            held = "no number" if number is None else f"{number:g}"
            self._not_searched(
                candidate, f"{knob.field} is {held}, outside of its range {knob.low:g} to {knob.high:g}"
            )
            return None
        return number

    def _values(self, current: Rung, knob: Knob) -> Sequence[float] | None:
        facts = self._steps.bench.facts_of(current.config)
        return None if knob.values is None else knob.values(current.config, facts)

    def _not_searched(self, candidate: Candidate, why: str) -> None:
        self._steps.view.findings.append(f"{candidate.key} was not searched: {why}")

    def _say(self, candidate: Candidate, knobs: Sequence[Knob], start: Numbers) -> None:
        words = " and ".join(
            f"{knob.field} from {number:g}" for knob, number in zip(knobs, start, strict=True)
        )
        self._steps.bench.say(f"search of {words}, for {candidate.treats[0]}")

    def _measure(
        self,
        current: Rung,
        candidate: Candidate,
        knobs: Sequence[Knob],
        numbers: Numbers,
        tried: _Tried,
    ) -> float | None:
        """Logarithm of the ratio; None where there is none: the values break a rule, do not fit memory or the budget,
        or could not be run."""
        leaves = {
            knob.field: knob.leaf_value(number)
            for knob, number in zip(knobs, numbers, strict=True)
            if number != knob.number(current.config)
        }
        change = Change(leaves, candidate.key)
        why = self._why_not(current, candidate, knobs, change)
        if why is not None:
            tried.refused[in_words(change)] = why
            self._steps.bench.say(f"{in_words(change)} is not tried: {why}")
            return None
        step = self._steps.begin(current, candidate, change)
        self._steps.predict(current, candidate, step, change)
        tried.made[numbers] = (step, change, self._steps.measure(current, candidate, step, change))
        measured: Mapping[str, float] | None = step["measured"]
        return None if measured is None else math.log(measured["ratio"])

    def _why_not(
        self, current: Rung, candidate: Candidate, knobs: Sequence[Knob], change: Change
    ) -> str | None:
        bench = self._steps.bench
        why = bench.why_illegal(current.config, change)
        if why is not None:
            return why
        after = changed(current.config, change)
        if not self._steps.fits(current, candidate, after=after):
            return "the budget left no room"
        limit_bytes = current.config.memory.device_memory_limit_bytes
        if limit_bytes is None or not any(knob.moves_memory for knob in knobs):
            return None
        needs = bench.needs(after)
        if not isinstance(needs, StepEstimate):
            return needs
        if needs.peak_bytes > limit_bytes:
            return (
                f"it needs {needs.peak_bytes:,} bytes, and memory.device_memory_limit_bytes = {limit_bytes:,}"
            )
        return None

    def _keep_best(self, current: Rung, candidate: Candidate, knobs: Sequence[Knob], tried: _Tried) -> Rung:
        """Gate the best of what was measured to be better, and nothing else."""
        better = {
            numbers: made[0]["measured"]["ratio"] for numbers, made in tried.made.items() if made[0]["faster"]
        }
        best = max(better, key=lambda numbers: better[numbers]) if better else None
        rung = current
        for numbers, (step, change, made) in tried.made.items():
            step.pop("faster")
            if numbers == best:
                rung = self._steps.gate_and_keep(current, step, candidate, change, made)
            elif best is not None:
                words = " ".join(
                    f"{knob.field} = {number:g}" for knob, number in zip(knobs, best, strict=True)
                )
                step["why"] += f"; the search went on to {words}"
        if tried.refused:
            listed = "; ".join(f"{words}: {why}" for words, why in tried.refused.items())
            self._steps.view.findings.append(f"{candidate.key}: values that were not tried: {listed}")
        return rung
