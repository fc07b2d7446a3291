"""What the ranks of a save or a load have to tell each other: short byte strings, gathered by all."""

import zlib
from typing import Protocol

import torch
import torch.distributed as dist

from drivetrain.engine.parallel.process_group import ProcessGroup

__all__ = ["ALONE", "Agreement", "agreement_over"]


class Agreement(Protocol):
    """The ranks that save or load together."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gather(self, message: bytes) -> list[bytes]:
        """Every rank's message on every rank, by rank. Every rank calls it as often."""


class _Alone:
    """One process agrees with itself."""

    rank = 0
    size = 1

    def gather(self, message: bytes) -> list[bytes]:
        """Its own message."""
        return [message]


ALONE: Agreement = _Alone()


class _Group:
    """The ranks of the default process group. Bytes travel over the host, no object is rebuilt from them."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank = group.ranks.rank
        self.size = group.size

    def gather(self, message: bytes) -> list[bytes]:
        """Every rank's message."""
        packed = zlib.compress(message, 1)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(packed)]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        messages = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(messages, padded)
        return [
            zlib.decompress(message[: int(size)].numpy().tobytes())
            for message, size in zip(messages, sizes, strict=True)
        ]


def agreement_over(group: ProcessGroup) -> Agreement:
    """The agreement of all ranks of a run."""
    return ALONE if group.size == 1 else _Group(group)
