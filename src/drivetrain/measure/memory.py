"""The plain record of what fills memory during a step: live bytes by category, predicted or measured.

Two codes that share nothing else fill it: ``engine/memory/predict.py`` without running anything, and
``measure/memory_events.py`` from what an allocator recorded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

__all__ = [
    "CATEGORIES",
    "Category",
    "Deviation",
    "MemoryByCategory",
    "Timeline",
    "deviations",
    "dominant",
    "timeline_of",
]

Category = Literal["parameters", "optimizer", "gradients", "activations", "communication", "temporaries"]
CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)
"""Each storage belongs to one: the first of them that fits.

=================  =====================================================================================
``parameters``     parameters as they are held between steps, and buffers of the model
``optimizer``      the optimizer's state
``gradients``      what is or was the gradient of a parameter, buckets of gradients included
``activations``    what a forward pass leaves behind and a backward pass finds: saved tensors
``communication``  what is handed to collectives and is none of the above
``temporaries``    all else that lives during a step
=================  =====================================================================================

Batches of tokens are in none: they come from the loader, often in memory that workers share.
"""

_MOST_POINTS: Final = 600
"""Of a timeline that is kept."""


@dataclass(frozen=True)
class Timeline:
    """Live bytes over one step.

    Attributes:
        unit: of ``places``: ``allocations`` (their number since the step began) or ``ms``.
        places: ascending; from each place to the next, bytes are those given for it, or less for a while.
        phases: of each place: ``forward``, ``backward``, ``optimizer`` ...
        live: category → bytes at each place.
    """

    unit: str
    places: tuple[float, ...]
    phases: tuple[str, ...]
    live: Mapping[str, tuple[int, ...]]

    @property
    def totals(self) -> tuple[int, ...]:
        """All categories together at each place."""
        return tuple(map(sum, zip(*self.live.values(), strict=True))) if self.places else ()

    def to_document(self) -> dict[str, Any]:
        """As ``memory.json`` holds it."""
        return {
            "unit": self.unit,
            "places": list(self.places),
            "phases": list(self.phases),
            "live": {name: list(values) for name, values in self.live.items()},
        }


@dataclass(frozen=True)
class MemoryByCategory:
    """What one rank holds during a step of the steady state.

    Attributes:
        source: ``predicted`` or ``measured``.
        peak_bytes: the most that is alive at once.
        at_peak: how that is made up; the values sum to it.
        own_peaks: of each category the most that is alive of it, at whatever instant.
        phase: in which the peak lies.
        peak_after: the operator or the place in time that brings it, in words.
        by_layer: activations of each layer when activations are at their most; empty: not known.
        timeline: over the step.
        not_counted: what is left out, a line each.
        resident_bytes, peak_resident_bytes: the process's resident set at the end, and its most; None: no process ran.
        reserved_bytes: held by a caching allocator; None: there is none, or it was not asked.
        fragmentation_bytes: of these, what is in no live block; only reported, never predicted.
    """

    rank: int
    world_size: int
    source: Literal["predicted", "measured"]
    peak_bytes: int
    at_peak: Mapping[str, int]
    own_peaks: Mapping[str, int]
    phase: str
    peak_after: str
    by_layer: Mapping[str, int]
    timeline: Timeline
    not_counted: tuple[str, ...] = ()
    resident_bytes: int | None = None
    peak_resident_bytes: int | None = None
    reserved_bytes: int | None = None
    fragmentation_bytes: int | None = None

    def __post_init__(self) -> None:
        assert set(self.at_peak) == set(CATEGORIES) == set(self.own_peaks)
        assert sum(self.at_peak.values()) == self.peak_bytes

    def to_document(self) -> dict[str, Any]:
        """As ``memory.json`` and ``--json`` hold it."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "source": self.source,
            "peak_bytes": self.peak_bytes,
            "at_peak": dict(self.at_peak),
            "own_peaks": dict(self.own_peaks),
            "phase": self.phase,
            "peak_after": self.peak_after,
            "by_layer": dict(self.by_layer),
            "timeline": self.timeline.to_document(),
            "not_counted": list(self.not_counted),
            "resident_bytes": self.resident_bytes,
            "peak_resident_bytes": self.peak_resident_bytes,
            "reserved_bytes": self.reserved_bytes,
            "fragmentation_bytes": self.fragmentation_bytes,
        }

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> "MemoryByCategory":
        """The record that :meth:`to_document` gave."""
        timeline = document["timeline"]
        given = {**document, "not_counted": tuple(document["not_counted"])}
        given["timeline"] = Timeline(
            unit=timeline["unit"],
            places=tuple(timeline["places"]),
            phases=tuple(timeline["phases"]),
            live={name: tuple(values) for name, values in timeline["live"].items()},
        )
        return MemoryByCategory(**given)


@dataclass(frozen=True)
class Deviation:
    """A category's own peak, predicted and measured.

    Attributes:
        relative: (predicted - measured) / measured; None where nothing was measured.
    """

    category: str
    predicted: int
    measured: int
    relative: float | None


def deviations(predicted: MemoryByCategory, measured: MemoryByCategory) -> tuple[Deviation, ...]:
    """One for each category, in their order; and one of the ``total``, whose peaks are compared."""

    def of(name: str, guess: int, found: int) -> Deviation:
        return Deviation(name, guess, found, (guess - found) / found if found else None)

    return (
        *(of(name, predicted.own_peaks[name], measured.own_peaks[name]) for name in CATEGORIES),
        of("total", predicted.peak_bytes, measured.peak_bytes),
    )


def dominant(memory: MemoryByCategory, share: float = 0.2) -> tuple[str, ...]:
    """Categories that hold at least ``share`` of the peak, the largest first."""
    order = sorted(CATEGORIES, key=lambda name: -memory.at_peak[name])
    return tuple(name for name in order if memory.at_peak[name] >= share * memory.peak_bytes > 0)


@dataclass
class _Bucket:
    """Neighbouring instants, of which the one with most bytes is kept."""

    place: float
    phase: str
    live: tuple[int, ...]
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = sum(self.live)


def timeline_of(
    unit: str,
    instants: Iterable[tuple[float, str, Sequence[int]]],
    length: float,
    most: int = _MOST_POINTS,
) -> Timeline:
    """A timeline of at most ``most`` points: of each stretch of the step, the instant at which most is alive.

    Args:
        instants: (place, phase, bytes of each category in their order), in the order of places from 0 to ``length``.
    """
    kept: dict[int, _Bucket] = {}
    for place, phase, live in instants:
        number = min(int(place / length * most), most - 1) if length > 0 else 0
        one = _Bucket(place, phase, tuple(live))
        if number not in kept or one.total > kept[number].total:
            kept[number] = one
    buckets = [kept[number] for number in sorted(kept)]
    return Timeline(
        unit=unit,
        places=tuple(one.place for one in buckets),
        phases=tuple(one.phase for one in buckets),
        live={name: tuple(one.live[index] for one in buckets) for index, name in enumerate(CATEGORIES)},
    )
