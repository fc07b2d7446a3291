"""Which of the backends that are right is chosen: the simplest that no other beats for certain."""

from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.engine.ops.tuned_file import Candidate

__all__ = ["LEAST_GAIN", "Decision", "decide", "least_and_spread"]

LEAST_GAIN = 0.03
"""Another backend has to be this much faster than a simpler one, besides what the measurement scatters."""
_UNSEEN = 0.5
"""How far below its least time an undisturbed call may lie, as a part of the scatter. Where disturbances come like an
exponential distribution of mean m, the least of n rounds lies m / n above the truth, and the third least about 2 m / n
above the least."""
_CONFIRMING = 2
"""Rounds that have to come near to the least."""


@dataclass(frozen=True)
class Decision:
    """The choice, and why in words."""

    backend: str
    reason: str


def least_and_spread(seconds: Sequence[float]) -> tuple[float, float]:
    """The least time of all rounds, and how far above it the third least lies, as a share.

    What disturbs a computation makes it slower, never faster: the least is nearest to what it takes. Where no two
    others come near to it, it was luck, or more rounds are needed.
    """
    ordered = sorted(seconds)
    return ordered[0], ordered[min(_CONFIRMING, len(ordered) - 1)] / ordered[0] - 1.0


def decide(candidates: Sequence[Candidate]) -> Decision | None:
    """The choice among candidates, the simplest first; None where none was timed."""
    timed = [one for one in candidates if one.rejected is None and one.seconds is not None]
    if not timed:
        return None
    incumbent = timed[0]
    reason = "the only one that is right here" if len(timed) == 1 else "none is faster by more than the noise"
    for one in timed[1:]:
        gain, needed = _gain(incumbent, one)
        if gain > needed:
            reason = f"{gain:.1%} less time than {incumbent.backend}; {needed:.1%} were needed"
            incumbent = one
    return Decision(incumbent.backend, reason)


def _gain(incumbent: Candidate, other: Candidate) -> tuple[float, float]:
    """How much less time ``other`` takes, and how much less it has to take, as shares of the incumbent's."""
    assert incumbent.seconds is not None
    assert other.seconds is not None
    scatter = max(incumbent.spread or 0.0, other.spread or 0.0)
    needed = max(LEAST_GAIN, _UNSEEN * scatter)
    return 1.0 - other.seconds / incumbent.seconds, needed
