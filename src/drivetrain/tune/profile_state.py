"""Whether a profile stands for the trial: its steps without the profiler against the blocks of that configuration.

A profile that was taken while something else used the machine describes another machine than the one whose gain was
measured. Formula: ``docs/tune.md``.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from drivetrain.measure.statistics import least_effect, student_t_quantile
from drivetrain.tune.trial_statistics import Noise, Side, noise_of

__all__ = ["CONFIDENCE", "Expected", "ProfileState", "expected_of", "state_of"]

CONFIDENCE = 1 - 0.05 / 2
"""Of each interval: two profiles are looked at, and both together err in 5% at most (Bonferroni)."""


@dataclass(frozen=True)
class Expected:
    """What a trial lets one expect of one more mean step of a side.

    Attributes:
        step_s: geometric mean of the mean steps of the side's blocks, in seconds.
        low_s, high_s: ends of the prediction interval at :data:`CONFIDENCE`, in seconds.
        deviation: standard deviation of a block, on the log scale, both sides together.
        blocks: of the side.
    """

    step_s: float
    low_s: float
    high_s: float
    deviation: float
    blocks: int


@dataclass(frozen=True)
class ProfileState:
    """What became of a profile that was held against a trial.

    Attributes:
        answer: ``alike``: its steps without the profiler took what the blocks let one expect. ``other``: they did not.
            ``unknown``: there was nothing to hold against each other.
        run: of the profile.
        mean_step_s: mean of its steps without the profiler, in seconds; None where it has none.
        steps: how many those were.
        expected: None where the trial tells nothing.
        why: for ``unknown``, in words; else empty.
    """

    answer: Literal["alike", "other", "unknown"]
    run: str
    mean_step_s: float | None
    steps: int | None
    expected: Expected | None
    why: str = ""

    def to_document(self) -> dict[str, Any]:
        """As ``tune.json`` shows it."""
        return asdict(self)

    @property
    def distance(self) -> float:
        """How far the steps are from what was expected, on the log scale; infinite where that cannot be said."""
        if self.mean_step_s is None or self.expected is None:
            return math.inf
        return abs(math.log(self.mean_step_s / self.expected.step_s))

    @property
    def in_words(self) -> str:
        """What was measured and what was expected, or why that cannot be said; without subject and full stop."""
        if self.expected is None or self.mean_step_s is None:
            return self.why
        expected = self.expected
        return (
            f"its {self.steps} steps without the profiler took {self.mean_step_s * 1e3:,.1f} ms in the mean, where the "
            f"{expected.blocks} blocks of that configuration let one expect {expected.low_s * 1e3:,.1f} to "
            f"{expected.high_s * 1e3:,.1f} ms"
        )


def expected_of(trial: Mapping[str, Any], side: Side, steps: int) -> Expected | None:
    """What the blocks of a trial say of the mean of ``steps`` more steps of one process of ``side``.

    The prediction interval of one more observation on the log scale, by Student's t. A block's deviation is pooled over
    both sides, each about its own mean, as in the trial's own interval; a drift over the trial is left in it, because
    the profile is of another time. A mean of fewer steps than a block's varies more, at most by the ratio of the
    numbers of steps (were steps independent, and all variation theirs). Below the least effect that ever counts
    nothing is told apart.

    Args:
        trial: its document, or a step's; ``mean_step_s`` and ``steps`` of its blocks are read.
        steps: in the mean that is looked for, at least one.

    Returns:
        None where the side has no block, or no side has two.
    """
    assert steps >= 1
    blocks = {
        one: [block for block in trial["blocks"] if block["side"] == one and block["mean_step_s"]]
        for one in ("A", "B")
    }
    times = {one: [float(block["mean_step_s"]) for block in blocks[one]] for one in blocks}
    noise = sum((noise_of(values) for values in times.values()), Noise())
    own, deviation = times[side], noise.deviation
    if not own or deviation is None:
        return None
    center = math.fsum(map(math.log, own)) / len(own)
    fewer = max(1.0, max(int(block["steps"]) for block in blocks[side]) / steps)
    quantile = student_t_quantile((1 + CONFIDENCE) / 2, noise.freedom)
    half = max(quantile * deviation * math.sqrt(fewer + 1 / len(own)), math.log1p(least_effect(0)))
    # exp() ends at the largest float: a few blocks may allow anything.
    low, high = (math.exp(max(-700.0, min(center + sign * half, 700.0))) for sign in (-1, 1))
    return Expected(math.exp(center), low, high, deviation, len(own))


def state_of(
    run: str, mean_step_s: float | None, steps: int | None, trial: Mapping[str, Any], side: Side
) -> ProfileState:
    """Hold a profile against the blocks of ``side`` of a trial.

    Args:
        run: of the profile.
        mean_step_s: mean of its steps without the profiler; None: there is none.
        steps: how many those were; None: not known.
        trial: see :func:`expected_of`.
    """
    if not mean_step_s or not steps:
        why = "nothing is known of its steps without the profiler"
        return ProfileState("unknown", run, mean_step_s, steps, None, why)
    expected = expected_of(trial, side, steps)
    if expected is None:
        why = "the trial has too few blocks to say how blocks of one configuration vary"
        return ProfileState("unknown", run, mean_step_s, steps, None, why)
    inside = expected.low_s <= mean_step_s <= expected.high_s
    return ProfileState("alike" if inside else "other", run, mean_step_s, steps, expected)
