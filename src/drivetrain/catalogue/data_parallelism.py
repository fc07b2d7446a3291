"""What entries about communication between data-parallel ranks have in common."""

from drivetrain.config import LaunchFacts, RunConfig, data_parallel_size
from drivetrain.measure.account import Account

__all__ = ["TRANSFERS", "no_other_rank", "overlap_in_words"]

TRANSFERS = tuple(
    f"communication.{group}.{part}"
    for group in ("dp", "world", "unknown")
    for part in ("transfer", "unsplit")
)
"""Time for which data moves between data-parallel ranks, under the names that a trace gives their group. Waiting for
the last rank to come is no part of it."""


def no_other_rank(config: RunConfig, facts: LaunchFacts) -> str | None:
    """Why nothing travels between data-parallel ranks; None where it does."""
    if facts.world_size == 1:
        return "one process has nobody to communicate with"
    if data_parallel_size(config, facts.world_size) == 1:
        return "there is one data-parallel rank, which has nothing to share or to reduce"
    return None


def overlap_in_words(account: Account | None) -> str:
    """The share of communication that was under compute, to end a sentence with; nothing where it is not known."""
    if account is None:
        return ""
    windows = [rank.whole for rank in account.ranks]
    hidden = sum(window.overlapped_communication_ns or 0 for window in windows)
    total = sum(window.communication_ns or 0 for window in windows)
    return f"; {hidden / total:.0%} of communication under compute" if total else ""
