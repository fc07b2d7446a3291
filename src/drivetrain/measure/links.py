"""Rates between pairs of ranks, and which of them is slow: against other pairs that lie alike, or its own way back."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SLOW_SHARE", "PairRate", "SlowLink", "slow_links"]

SLOW_SHARE = 0.6
"""Of the median rate of pairs that lie alike: below it a link is called slow. Undisturbed pairs of one machine differ
by less."""


@dataclass(frozen=True)
class PairRate:
    """What one rank sent another.

    Attributes:
        source, target: ranks.
        same_host: whether both are on one machine.
        bytes_per_s: of large messages, until the answer that one has come; the median of several.
        latency_s: half of a small message's way there and back; the median of many.
    """

    source: int
    target: int
    same_host: bool
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class SlowLink:
    """A pair that is slower than it should be.

    Attributes:
        reference_bytes_per_s: what it is compared with.
        reference: in words.
    """

    pair: PairRate
    reference_bytes_per_s: float
    reference: str

    def in_words(self) -> str:
        """One line."""
        return (
            f"from rank {self.pair.source} to rank {self.pair.target}: {self.pair.bytes_per_s / 1e9:.3g} GB/s, "
            f"{self.pair.bytes_per_s / self.reference_bytes_per_s:.0%} of {self.reference} "
            f"({self.reference_bytes_per_s / 1e9:.3g} GB/s)"
        )


def slow_links(rates: Sequence[PairRate]) -> list[SlowLink]:
    """The slow ones, the slowest first. With a single pair, its two directions are compared."""
    found: list[SlowLink] = []
    for same_host in (True, False):
        alike = [pair for pair in rates if pair.same_host == same_host]
        if len(alike) == 2:
            best = max(pair.bytes_per_s for pair in alike)
            reference = "the way back"
        elif alike:
            best = statistics.median(pair.bytes_per_s for pair in alike)
            reference = f"the median of pairs {'of one machine' if same_host else 'on two machines'}"
        for pair in alike:
            if pair.bytes_per_s < SLOW_SHARE * best:
                found.append(SlowLink(pair, best, reference))
    return sorted(found, key=lambda link: link.pair.bytes_per_s / link.reference_bytes_per_s)
