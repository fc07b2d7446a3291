"""Claims: two sides, a ratio turned so that at least ``target`` is won, an interval, a note."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain.measure.statistics import ratio_of_medians

__all__ = ["Claim", "claim_of_ratios", "claim_of_times", "document", "verdict", "wilson"]


@dataclass(frozen=True)
class Claim:
    """One line of the results.

    Attributes:
        claim: what is claimed, in words.
        peer: whom it is compared with.
        peer_version: of the peer.
        a: our times in seconds; empty for a claim that is no time.
        b: the peer's.
        ratio: median(b) / median(a), or the figure itself.
        low, high: 95% bootstrap interval of the ratio.
        target: the claim holds from this ratio on. 0: reported for information, nothing is claimed.
        note: conditions, and whatever a reader must know to believe it.
    """

    claim: str
    peer: str
    peer_version: str
    a: list[float]
    b: list[float]
    ratio: float
    low: float
    high: float
    target: float
    note: str


def claim_of_times(
    claim: str,
    peer: str,
    peer_version: str,
    a: Sequence[float],
    b: Sequence[float],
    *,
    target: float,
    note: str,
) -> Claim:
    """A claim about times: ``a`` ours, ``b`` the peer's, seconds, one value per block."""
    ratio, low, high = ratio_of_medians(a, b)
    return Claim(claim, peer, peer_version, list(a), list(b), ratio, low, high, target, note)


def claim_of_ratios(
    claim: str, peer: str, peer_version: str, ratios: Sequence[float], *, target: float, note: str
) -> Claim:
    """A claim about a share or a size; ``ratios`` are repeated measurements, already turned."""
    ratio, low, high = ratio_of_medians([1.0], ratios)
    return Claim(claim, peer, peer_version, [], [], ratio, low, high, target, note)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """95% interval of a share (Wilson 1927)."""
    z, share = 1.959964, successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return centre - half, centre + half


def verdict(claim: Claim) -> str:
    """``won``, ``lost`` or ``information``."""
    if claim.target == 0:
        return "information"
    return "won" if claim.ratio >= claim.target else "lost"


def document(claims: Sequence[Claim]) -> str:
    """The JSON document of a benchmark script."""
    body: dict[str, Any] = {"claims": [asdict(claim) for claim in claims]}
    return json.dumps(body, indent=2, allow_nan=False)
