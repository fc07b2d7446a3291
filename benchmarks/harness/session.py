"""An interleaved session: all sides in turn, then in reverse, so that drift of the machine hits them alike."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median

from drivetrain.measure.statistics import ratio_of_medians
from harness.blocks import Block

__all__ = [
    "SameWorkError",
    "a_against_a",
    "block_medians",
    "interleaved",
    "palindrome",
    "require_same_work",
    "worst_foreign_share",
]

LOSS_TOLERANCE = 0.02


class SameWorkError(Exception):
    """Two sides that did not do the same work cannot be compared."""


def palindrome(ours: str, others: Sequence[str], rounds: int) -> list[str]:
    """``A B C A D E A`` and back, ``rounds`` times: ours before, between and after pairs of the others."""
    forward = [ours]
    for index in range(0, len(others), 2):
        forward += [*others[index : index + 2], ours]
    return (forward + forward[::-1]) * rounds


def interleaved(
    order: Sequence[str], sides: Mapping[str, Callable[[], Block]], title: str
) -> dict[str, list[Block]]:
    """Run the sides in ``order``, one process after the other; blocks by side, in time order."""
    blocks: dict[str, list[Block]] = {name: [] for name in sides}
    for number, name in enumerate(order, start=1):
        start = time.monotonic()
        block = sides[name]()
        blocks[name].append(block)
        foreign = "unknown" if block.foreign_share is None else f"{block.foreign_share:.1%}"
        print(
            f"{title}: {number}/{len(order)} {block.side}: {block.median_s * 1e3:.1f} ms a step "
            f"(others took {foreign}, attempt {block.attempts}, {time.monotonic() - start:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
    return blocks


def a_against_a(blocks: Sequence[Block]) -> float | None:
    """How far apart two sets of blocks of the very same thing are, as a share: every other block is a set.

    The share is ``|ratio of medians - 1|``; None with fewer than two blocks.
    """
    if len(blocks) < 2:
        return None
    first, second = [block.median_s for block in blocks[::2]], [block.median_s for block in blocks[1::2]]
    return abs(ratio_of_medians(first, second, resamples=1)[0] - 1)


def require_same_work(ours: Block, theirs: Block) -> str:
    """Compare what two sides say they did; returns a line for the note.

    Both start from the same weights and see the same rows, so the mean training loss must agree; theirs
    predicts one token a row less than ours.

    Raises:
        SameWorkError: parameters, tokens of a step, or losses differ.
    """
    if ours.parameters != theirs.parameters:
        raise SameWorkError(f"{theirs.side} has {theirs.parameters} parameters, ours {ours.parameters}")
    if ours.tokens_per_step != theirs.tokens_per_step:
        raise SameWorkError(
            f"{theirs.side} takes {theirs.tokens_per_step} tokens a step, ours {ours.tokens_per_step}"
        )
    our_loss, their_loss = mean(ours.losses), mean(theirs.losses)
    if abs(our_loss - their_loss) > LOSS_TOLERANCE * our_loss:
        raise SameWorkError(
            f"{theirs.side} has a mean training loss of {their_loss:.4f}, ours {our_loss:.4f}"
        )
    return (
        f"same work: {ours.parameters:,} parameters, {ours.tokens_per_step:,} tokens a step, mean training loss "
        f"{our_loss:.3f} (ours, from {ours.losses[0]:.3f} to {ours.losses[-1]:.3f}) and {their_loss:.3f}"
    )


def worst_foreign_share(blocks: Sequence[Block]) -> float:
    """The largest share of the machine that others took in any of ``blocks``."""
    return max((block.foreign_share or 0.0 for block in blocks), default=0.0)


def block_medians(blocks: Sequence[Block]) -> list[float]:
    """One time per block, seconds."""
    return [median(block.step_s) for block in blocks]
