"""The processes of a run: their ranks, the group they form, and small messages between them.

``torchrun`` describes each process in its environment. A run of one process forms no group at all, so
that the plain case depends on nothing.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from drivetrain.engine.parallel.flights import Flights, flown_or_watched
from drivetrain.engine.parallel.streams import let_streams_end
from drivetrain.errors import EnvironmentFault

__all__ = ["PendingSum", "ProcessGroup", "Ranks", "join"]

_TEXT_BYTES = 4096
_SETTLE_S = 0.1
_FINISH_S = 5.0
"""For which a rank that fails takes part in collectives that it has begun."""


@dataclass(frozen=True)
class Ranks:
    """Place of this process in the run, as torchrun's environment gives it."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @staticmethod
    def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
        """True when RANK, LOCAL_RANK and WORLD_SIZE are all set."""
        return all(name in environment for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Ranks":
        """Ranks of this process; a single process when torchrun did not start it."""
        if not cls.started_by_torchrun(environment):
            return cls()
        world_size = _whole_number(environment, "WORLD_SIZE")
        ranks = cls(
            rank=_whole_number(environment, "RANK"),
            local_rank=_whole_number(environment, "LOCAL_RANK"),
            world_size=world_size,
            local_world_size=_whole_number(environment, "LOCAL_WORLD_SIZE", default=world_size),
        )
        if not 0 <= ranks.rank < ranks.world_size:
            raise EnvironmentFault(
                f"RANK={ranks.rank} is outside WORLD_SIZE={ranks.world_size}; "
                "start the run with torchrun, or unset both variables"
            )
        return ranks


def _whole_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise EnvironmentFault(
            f"environment variable {name}={text!r} is not a whole number; start the run with torchrun"
        ) from None


class PendingSum:
    """A sum over ranks that is under way; :meth:`wait` gives the totals."""

    def __init__(self, values: torch.Tensor, work: dist.Work | None) -> None:
        self._values = values
        self._work = work

    def wait(self) -> list[int]:
        """Block until every rank has contributed; returns the totals, int64."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return [int(value) for value in self._values.tolist()]


@dataclass(frozen=True)
class ProcessGroup:
    """The group of all ranks. Every method is free of communication when there is one rank.

    Attributes:
        ranks: this process among them.
        flights: times of its collectives, as those of ``world``, once a step was begun in them.
    """

    ranks: Ranks
    flights: Flights = field(default_factory=Flights, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes the run directory."""
        return self.ranks.rank == 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks.world_size

    def start_sum(self, values: Sequence[int]) -> PendingSum:
        """Begin to sum whole numbers over the ranks, on the host, without touching the device."""
        tensor = torch.tensor(list(values), dtype=torch.int64)
        return PendingSum(tensor, self.sum_(tensor, async_op=True))

    def sum_(self, tensor: torch.Tensor, *, async_op: bool = False) -> dist.Work | None:
        """Sum ``tensor`` over the ranks in place, on its own device."""
        if self.size == 1:
            return None
        flight = None
        if tensor.device.type == "cpu":
            flight = self.flights.begin("world", "all_reduce", tensor.nbytes, dist.group.WORLD)
        return flown_or_watched(
            lambda go_on: dist.all_reduce(tensor, async_op=go_on), flight, async_op=async_op
        )

    def maximum(self, value: float) -> float:
        """The largest of the ranks' values."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())

    def barrier(self) -> None:
        """Return when every rank has come here."""
        # A sum of host integers and not dist.barrier(): with two backends that one picks the device's.
        self.start_sum([0]).wait()

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, by rank, on every rank; of any length. Bytes travel, no object is rebuilt."""
        if self.size == 1:
            return [text]
        encoded = text.encode()
        longest = int(self.maximum(float(len(encoded))))
        # The length travels in front: a text may end in anything.
        own = torch.zeros(longest + 8, dtype=torch.uint8)
        own[: len(encoded) + 8] = torch.tensor(
            [*len(encoded).to_bytes(8, "little"), *encoded], dtype=torch.uint8
        )
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own)
        received = [bytes(one.tolist()) for one in found]
        return [one[8 : 8 + int.from_bytes(one[:8], "little")].decode() for one in received]

    def broadcast_text(self, text: str) -> str:
        """Rank 0's text on every rank (cut at 4 KiB of UTF-8). Bytes travel, no object is rebuilt."""
        if self.size == 1:
            return text
        encoded = text.encode()[:_TEXT_BYTES]
        buffer = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        buffer[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        dist.broadcast(buffer, src=0)
        return bytes(buffer.tolist()).rstrip(b"\0").decode(errors="replace")


def _store_of_attempt(timeout: timedelta) -> Store | None:
    """Where the ranks find each other under torchrun; None: as torch does it by itself.

    torchrun's agent keeps one store over all its restarts. Under one name the ranks of a second attempt would find the
    addresses of the first, which nobody answers any more: each attempt has a prefix of its own.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    agent = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout
    )
    return PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", agent)


@contextmanager
def join(ranks: Ranks, device_type: str, timeout_minutes: float) -> Iterator[ProcessGroup]:
    """Form the group of all ranks and leave it cleanly.

    Host tensors travel over gloo; device tensors over NCCL where the device is CUDA.
    """
    if ranks.world_size == 1:
        yield ProcessGroup(ranks)
        return
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    try:
        timeout = timedelta(minutes=timeout_minutes)
        dist.init_process_group(
            backend,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
            store=_store_of_attempt(timeout),
        )
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"rank {ranks.rank} of {ranks.world_size} on {socket.gethostname()} cannot join the process group: "
            f"{error}"
        ) from error
    try:
        yield ProcessGroup(ranks)
    except BaseException:
        # Collectives in levels are handed over by streams, after this thread has gone on. The other ranks hand over the
        # same: those that this rank has begun come to an end, while of half of them nobody would be let go. The others
        # then wait for what this rank never begins, and learn from its end that it has gone.
        let_streams_end(_FINISH_S)
        raise
    finally:
        # A gloo thread that has just finished a collective needs the interpreter lock to drop what it holds.
        # Taking the group down joins that thread *with* the lock held, and torch 2.13 then waits for ever (seen
        # as ~Reducer -> ~ProcessGroupGloo -> thread::join). Sleeping gives the lock away first.
        time.sleep(_SETTLE_S)
        dist.destroy_process_group()
