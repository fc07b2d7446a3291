"""What a ladder climbs for: the score of a block, and the decision of a trial by it.

Whatever the goal, what decides is the ratio of the candidate's score to its parent's with its interval
(:mod:`drivetrain.tune.trial_statistics`), so that above 1 is better.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from drivetrain.archive.reader import open_run
from drivetrain.config import RunConfig, nearest
from drivetrain.errors import DrivetrainError, RunError
from drivetrain.tune.trial_statistics import Judgement, Noise, Side, SpeedRatio, judge, speed_ratio

__all__ = ["GOALS", "Goal", "GoalName", "Scored", "counted_event", "goal_of_text", "kept_speed"]

GoalName = Literal["tokens_per_second", "effective_tokens", "memory", "cost"]
GOALS: tuple[GoalName, ...] = get_args(GoalName)

_MEANS: Mapping[GoalName, str] = {
    "tokens_per_second": "tokens of a step over the median step time",
    "effective_tokens": "tokens of a step that carry loss (mean of the measured steps) over the median step time",
    "memory": "most live tensor bytes of a step, counted, of a rank; the ratio is the parent's over the candidate's",
    "cost": "processes times the median step time over the tokens of a step; the ratio is the parent's over the "
    "candidate's",
}
_UNITS: Mapping[GoalName, str] = {
    "tokens_per_second": "token/s",
    "effective_tokens": "token/s that carry loss",
    "memory": "byte",
    "cost": "device-second/token",
}
_RATIOS: Mapping[GoalName, str] = {
    "tokens_per_second": "the speed",
    "effective_tokens": "the tokens/s that carry loss",
    "memory": "the inverse of the live bytes",
    "cost": "the tokens a device-second",
}
_LIMIT = "memory.device_memory_limit_bytes"
_NO_LIMIT = 2**63 - 1
_WORDS: Mapping[GoalName, tuple[str, str]] = {
    "tokens_per_second": ("faster", "slower"),
    "effective_tokens": ("faster in tokens that carry loss", "slower in tokens that carry loss"),
    "memory": ("less memory", "more memory"),
    "cost": ("cheaper", "dearer"),
}


class Scored(Protocol):
    """What a goal needs of a block of a trial."""

    @property
    def step_s(self) -> float | None:
        """Median step."""
        ...

    @property
    def mean_step_s(self) -> float | None:
        """Mean step."""
        ...

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of a step over the median step."""
        ...

    @property
    def effective_tokens_per_second(self) -> float | None:
        """The same of tokens that carry loss; None where the run does not log them."""
        ...

    @property
    def live_bytes(self) -> int | None:
        """Most live tensor bytes, counted; None where they were not."""
        ...

    @property
    def processes(self) -> int:
        """Of the run."""
        ...


@dataclass(frozen=True)
class Goal:
    """What counts.

    Attributes:
        name: of the goal.
        slower_at_most: where memory is the goal, the share by which a step of the final configuration may take longer
            than one of the baseline.
        price_per_device_hour: where cost is the goal, what a device costs an hour, in any currency; None: cost is in
            device-seconds.
        allocator_counts: live bytes are counted by the device's allocator, and not by a step before the first.
        speed_so_far: where memory is the goal, the speed of the trial's parent over the baseline's, by the trials of
            what was kept.
    """

    name: GoalName = "tokens_per_second"
    slower_at_most: float = 0.05
    price_per_device_hour: float | None = None
    speed_so_far: float = 1.0
    allocator_counts: bool = False

    def __post_init__(self) -> None:
        assert self.name in GOALS
        assert self.slower_at_most >= 0
        assert self.price_per_device_hour is None or self.price_per_device_hour > 0

    @classmethod
    def from_document(cls, document: Mapping[str, Any] | None) -> "Goal":
        """As the settings of a tune keep it; None: of a tune from before there were goals."""
        return cls() if document is None else cls(**document)

    def after(self, speed: float) -> "Goal":
        """The goal of a trial whose parent has ``speed`` times the baseline's."""
        return replace(self, speed_so_far=speed) if self.name == "memory" else self

    @property
    def is_of_memory(self) -> bool:
        """Whether bytes are what counts, which have no speed."""
        return self.name == "memory"

    @property
    def least_speed(self) -> float:
        """Where memory is the goal: the least speed of a candidate over its parent's that is no more than
        ``slower_at_most`` below the baseline's."""
        return 1 / (1 + self.slower_at_most) / self.speed_so_far

    @property
    def ratio_of(self) -> str:
        """What a ratio is of."""
        return _RATIOS[self.name]

    def counting(self, config: RunConfig) -> dict[str, Any]:
        """Leaf → value with which a run on a CPU counts its live bytes: a limit that nothing reaches, where it has
        none. Nothing, where they need not be counted."""
        if (
            self.name != "memory"
            or self.allocator_counts
            or config.memory.device_memory_limit_bytes is not None
        ):
            return {}
        return {_LIMIT: _NO_LIMIT}

    @property
    def unit(self) -> str:
        """Of :meth:`figure`."""
        if self.name == "cost" and self.price_per_device_hour is not None:
            return "price of a million tokens"
        return _UNITS[self.name]

    @property
    def rule(self) -> str:
        """How it is measured, in words."""
        rule = _MEANS[self.name]
        if self.name == "memory":
            rule += f"; the step time of the baseline may grow by {self.slower_at_most:.3g} of it at most"
        if self.name == "cost" and self.price_per_device_hour is not None:
            rule += f"; {self.price_per_device_hour:g} a device-hour"
        return rule

    def to_document(self) -> dict[str, Any]:
        """As the document of a tune shows it."""
        return {
            "name": self.name,
            "unit": self.unit,
            "rule": self.rule,
            "slower_at_most": self.slower_at_most if self.name == "memory" else None,
            "price_per_device_hour": self.price_per_device_hour,
        }

    # -- of a block ---------------------------------------------------------------------------------------------

    def score(self, block: Scored) -> float | None:
        """What a block comes to, so that more is better; None where it lacks what it takes."""
        if self.name == "effective_tokens":
            return block.effective_tokens_per_second or None
        if self.name == "memory":
            return None if not block.live_bytes else 1 / block.live_bytes
        if block.tokens_per_second is None:
            return None
        return block.tokens_per_second / (block.processes if self.name == "cost" else 1)

    def figure(self, score: float) -> float:
        """A score in :attr:`unit`."""
        if self.name == "memory":
            return 1 / score
        if self.name == "cost":
            return (
                1e6 / score * (self.price_per_device_hour / 3600) if self.price_per_device_hour else 1 / score
            )
        return score

    def lacks(self, block: Scored) -> str | None:
        """Why a block that ended well has no score; None where it has one."""
        if block.tokens_per_second is None:
            return "each of its steps was tagged (warm-up, compile)"
        if self.score(block) is not None:
            return None
        if self.name == "memory":
            return "its live bytes were not counted"
        return "none of its tokens carried loss, or it did not log them"

    # -- of a trial ---------------------------------------------------------------------------------------------

    def judge(
        self,
        order: Sequence[Side],
        blocks: Sequence[Scored],
        *,
        looks: int,
        confidence: float,
        noise: Noise,
    ) -> tuple[Judgement, SpeedRatio | None]:
        """The decision, and the ratio of tokens/s where that is another than the judgement's own.

        Args:
            order, looks, confidence, noise: see :func:`drivetrain.tune.trial_statistics.judge`; the noise is of scores.
            blocks: each with a score.
        """
        scores = [score for block in blocks if (score := self.score(block)) is not None]
        assert len(scores) == len(blocks)
        judged = judge(
            order, scores, looks=looks, confidence=confidence, noise=noise, words=_WORDS[self.name]
        )
        if self.name == "tokens_per_second":
            return judged, None
        speeds = [block.tokens_per_second for block in blocks if block.tokens_per_second is not None]
        speed = speed_ratio(order, speeds, confidence=1 - (1 - confidence) / looks)
        if self.name != "memory" or judged.state != "faster":
            return judged, speed
        return self._held_to_its_speed(judged, speed), speed

    def _held_to_its_speed(self, judged: Judgement, speed: SpeedRatio) -> Judgement:
        """Less memory counts where the speed is shown to stay above the least that is allowed."""
        words = (
            f"{judged.why}; speed {speed.ratio:.3f}x, {speed.low:.3f} to {speed.high:.3f}, where "
            f"{self.least_speed:.3f} of the parent's is the least that is allowed"
        )
        if speed.low >= self.least_speed:
            return replace(judged, why=words)
        if speed.high < self.least_speed:
            return replace(judged, state="slower", why=f"slower than allowed: {words}")
        return replace(
            judged, state="undecided", why=f"not shown to be fast enough, the machine is too noisy: {words}"
        )

    def refuted_by_means(self, parents: Sequence[Scored], candidates: Sequence[Scored]) -> str | None:
        """Why a gain by medians is none by the means of all steps, which is what a run pays; None where it is one."""
        if self.name == "memory":
            return None
        ratio = self._by_means(candidates) / self._by_means(parents)
        if ratio > 1:
            return None
        return f"but not by the mean of all its steps ({ratio:.3f}x): some are so slow that the gain is gone"

    def _by_means(self, blocks: Sequence[Scored]) -> float:
        """Score of a side by mean instead of median steps."""
        work = sum((self.score(block) or 0.0) * (block.step_s or 0.0) for block in blocks)
        return work / sum(block.mean_step_s or 0.0 for block in blocks)


def counted_event(run: Path) -> Mapping[str, Any] | None:
    """The event of a run that counted its live bytes when it began, on a CPU; None where it did not, or does not say so
    any more (it is gone, or damaged)."""
    try:
        events = open_run(run).events()
    except RunError:
        return None
    counts = [event for event in events if event["kind"] == "window" and event.get("what") == "memory_count"]
    return counts[-1] if counts else None


def kept_speed(steps: Sequence[Mapping[str, Any]]) -> float:
    """Speed of a configuration over the baseline's, by the trials of the steps that made it."""
    return math.prod(float((step.get("speed") or step["measured"])["ratio"]) for step in steps)


def goal_of_text(text: str) -> GoalName:
    """The goal called ``text``.

    Raises:
        DrivetrainError: there is none; the message has the nearest.
    """
    for name in GOALS:
        if text == name:
            return name
    close = nearest(text, GOALS)
    raise DrivetrainError(
        f"--goal {text}: there is no such goal; one of {', '.join(GOALS)}{f'; did you mean {close}?' if close else ''}"
    )
