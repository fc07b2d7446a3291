"""How fast bytes move between each pair of ranks, before a job relies on it: messages of host memory over gloo.

One pair at a time, so that no pair disturbs another. Device memory has links of its own (NVLink, NCCL's network
transports), of which this says nothing.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import torch
import torch.distributed as dist

from drivetrain.config.hosts import host_of
from drivetrain.engine.parallel.process_group import ProcessGroup
from drivetrain.measure.links import PairRate

__all__ = ["ALL_PAIRS_UP_TO", "ProbeSettings", "pairs_of", "probe_links"]

ALL_PAIRS_UP_TO = 16
"""Ranks of which all pairs are probed; of more, each with its neighbour in the ring that collectives form."""


@dataclass(frozen=True)
class ProbeSettings:
    """Attributes:
    message_bytes: of a large message.
    messages: large ones in each direction, of which the median counts.
    pings: small ones, of which the median counts.
    """

    message_bytes: int = 8_000_000
    messages: int = 7
    pings: int = 50


def pairs_of(world_size: int) -> list[tuple[int, int]]:
    """Which ranks are probed with each other."""
    if world_size <= ALL_PAIRS_UP_TO:
        return list(combinations(range(world_size), 2))
    return [(rank, (rank + 1) % world_size) for rank in range(world_size)]


def probe_links(
    group: ProcessGroup, settings: ProbeSettings, report: Callable[[int, int], None] | None = None
) -> list[PairRate]:
    """Both directions of each pair, on every rank. Collective over all ranks.

    Args:
        report: told on each rank how many pairs of how many are done.
    """
    own: list[PairRate] = []
    rank = group.ranks.rank
    pairs = pairs_of(group.size)
    buffer = torch.zeros(settings.message_bytes, dtype=torch.uint8)
    for number, (first, second) in enumerate(pairs, start=1):
        group.barrier()
        if rank in (first, second):
            peer = second if rank == first else first
            latency = statistics.median(_round_trips(rank == first, peer, settings.pings)) / 2
            for source in (first, second):
                seconds = _one_way(rank == source, peer, buffer, settings.messages)
                if rank == source:
                    # The answer is in it: of a large message a small part, and no difference of two noisy times.
                    rate = settings.message_bytes / statistics.median(seconds)
                    own.append(_rate(group, source, peer, rate, latency))
        if report is not None:
            report(number, len(pairs))
    texts = group.gather_texts(json.dumps([asdict(one) for one in own]))
    return [PairRate(**one) for text in texts for one in json.loads(text)]


def _rate(group: ProcessGroup, source: int, target: int, bytes_per_s: float, latency_s: float) -> PairRate:
    per_host = group.ranks.local_world_size
    same_host = host_of(source, per_host) == host_of(target, per_host)
    return PairRate(source, target, same_host, bytes_per_s, latency_s)


def _round_trips(leads: bool, peer: int, count: int) -> Sequence[float]:
    small = torch.zeros(1, dtype=torch.uint8)
    return _timed(leads, peer, count, small, small)


def _one_way(sends: bool, peer: int, buffer: torch.Tensor, count: int) -> Sequence[float]:
    """Seconds from sending each message to the answer that it has come; what the receiver returns means nothing."""
    return _timed(sends, peer, count, buffer, torch.zeros(1, dtype=torch.uint8))


def _timed(leads: bool, peer: int, count: int, there: torch.Tensor, back: torch.Tensor) -> Sequence[float]:
    seconds: list[float] = []
    # The first one opens what is opened on first use, and is not counted.
    for _ in range(count + 1):
        before = time.perf_counter()
        if leads:
            dist.send(there, peer)
            dist.recv(back, peer)
        else:
            dist.recv(there, peer)
            dist.send(back, peer)
        seconds.append(time.perf_counter() - before)
    return seconds[1:]
