"""Failures of torch that are nobody's bug, in words: no memory left, another process of the run gone."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from drivetrain.errors import DrivetrainError, EnvironmentFault

__all__ = ["explain", "explained", "explained_in"]

_RANKS_SHOWN = 16

# What torch raises has no class of its own: these words are in the messages of version 2.13.
_NO_MEMORY = ("can't allocate memory", "not enough memory")
_NO_PEER = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "timeout caused pair closure",
)


def explain(error: BaseException) -> DrivetrainError | None:
    """What ``error`` means to the user; None where it is not known to be anything but a bug."""
    text = str(error)
    first_line = text.strip().split("\n", 1)[0][:300]
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)
    ):
        return EnvironmentFault(
            f"out of memory ({first_line or type(error).__name__}); lower training.micro_batch_size, "
            "model.seq_length or the model's size, or free memory"
        )
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in text for words in _NO_PEER)
    ):
        # "[file:line] Read error [address]: Connection reset by peer. This is typically caused by ..."
        said = re.sub(r"^\[[^\]]*\] *", "", first_line).split(". This is ")[0]
        return EnvironmentFault(f"another process of the run has ended or cannot be reached ({said})")
    return None


@contextmanager
def explained() -> Iterator[None]:
    """Raise what :func:`explain` makes of an error in the block, in its place."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        meaning = explain(error)
        if meaning is None:
            raise
        raise meaning from error


@contextmanager
def explained_in(kind: str, name: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """As :func:`explained`, of a collective: the message says which, and whose processes take part in it.

    Args:
        kind: of the collective, in words.
        name: of the group, as the user knows it.
        group: its ranks are looked up where there is something to say.
    """
    try:
        yield
    except RuntimeError as error:
        meaning = explain(error)
        if meaning is None:
            raise
        ranks = dist.get_process_group_ranks(group)
        shown = ", ".join(map(str, ranks[:_RANKS_SHOWN])) + (", ..." if len(ranks) > _RANKS_SHOWN else "")
        raise type(meaning)(f"{meaning}, in the {kind} of {name} over ranks {shown}") from error
