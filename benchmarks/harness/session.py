"""An interleaved session: all sides in turn, then in reverse, so that drift of the machine hits them alike."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from drivetrain.measure.statistics import ratio_of_medians
from harness.lanes import Block, Done, Lane, Side

__all__ = [
    "Pace",
    "Ran",
    "SameWorkError",
    "a_against_a",
    "medians",
    "palindrome",
    "require_same_work",
    "run_session",
]

LOSS_TOLERANCE = 0.01


@dataclass(frozen=True)
class Pace:
    """How a session goes.

    Attributes:
        warmup: steps of a lane before its first block (allocator, thread pools, compilation).
        steps: timed steps in a block.
        rounds: times the order is run.
        attempts: times a disturbed block is tried.
        patience_s: longest wait for a quiet machine before a block.
    """

    warmup: int
    steps: int
    rounds: int
    attempts: int
    patience_s: float


@dataclass(frozen=True)
class Ran:
    """What a side did in a session."""

    name: str
    blocks: list[Block]
    done: Done


class SameWorkError(Exception):
    """Two sides that did not do the same work cannot be compared."""


def palindrome(ours: str, others: Sequence[str], rounds: int) -> list[str]:
    """``A B A C A`` and back, ``rounds`` times: ours before and after each of the others."""
    forward = [ours]
    for other in others:
        forward += [other, ours]
    return (forward + forward[::-1]) * rounds


def run_session(sides: Mapping[str, Side], order: Sequence[str], folder: Path, pace: Pace) -> dict[str, Ran]:
    """Start every side, give them turns in ``order``, end them; by key, blocks in time order."""
    with ExitStack() as stack:
        lanes = {
            key: stack.enter_context(
                Lane(side, folder / str(number), warmup=pace.warmup, patience_s=pace.patience_s)
            )
            for number, (key, side) in enumerate(sides.items())
        }
        for number, key in enumerate(order, start=1):
            block = lanes[key].quiet_block(pace.steps, pace.attempts)
            print(
                f"  {number}/{len(order)} {sides[key].name}: {block.median_s * 1e3:.1f} ms a step, others took "
                f"{block.foreign_share:.1%}",
                file=sys.stderr,
                flush=True,
            )
        return {key: Ran(sides[key].name, lane.blocks, lane.finish()) for key, lane in lanes.items()}


def quiet_only(blocks: Sequence[Block]) -> list[Block]:
    """The blocks that nobody disturbed; all of them when that leaves fewer than two."""
    quiet = [block for block in blocks if block.quiet]
    return quiet if len(quiet) >= 2 else list(blocks)


def medians(ran: Ran) -> list[float]:
    """One time for each block that counts, seconds."""
    return [block.median_s for block in quiet_only(ran.blocks)]


def a_against_a(times: Sequence[float]) -> float | None:
    """How far apart two sets of blocks of the very same thing are: every other block is a set.

    The share ``|ratio of medians - 1|``; None with fewer than two blocks.
    """
    if len(times) < 2:
        return None
    return abs(ratio_of_medians(times[::2], times[1::2], resamples=1)[0] - 1)


def require_same_work(ours: Done, theirs: Done, name: str) -> str:
    """Compare what two sides say they did; returns a line for the note.

    Both start from the same weights and see the same rows, so the mean training loss over the same number of
    steps must agree; theirs predicts one token a row less than ours.

    Raises:
        SameWorkError: parameters, tokens of a step, or losses differ.
    """
    if ours.parameters != theirs.parameters:
        raise SameWorkError(f"{name} has {theirs.parameters:,} parameters, ours {ours.parameters:,}")
    if ours.tokens_per_step != theirs.tokens_per_step:
        raise SameWorkError(
            f"{name} takes {theirs.tokens_per_step:,} tokens a step, ours {ours.tokens_per_step:,}"
        )
    steps = theirs.steps
    if steps > ours.steps and len(theirs.losses) < theirs.steps:
        raise SameWorkError(
            f"{name} only tells its mean loss over {steps} steps, and ours has done {ours.steps}"
        )
    steps = min(steps, ours.steps)
    our_loss, their_loss = mean(ours.losses[:steps]), mean(theirs.losses[:steps])
    if abs(our_loss - their_loss) > LOSS_TOLERANCE * our_loss:
        raise SameWorkError(f"{name} has a mean training loss of {their_loss:.4f}, ours {our_loss:.4f}")
    return (
        f"same work: {ours.parameters:,} parameters, {ours.tokens_per_step:,} tokens a step, mean loss of the first "
        f"{steps} steps {our_loss:.4f} (ours, from {ours.losses[0]:.4f} down to {ours.losses[steps - 1]:.4f}) "
        f"and {their_loss:.4f}"
    )
