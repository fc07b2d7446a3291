"""What this rank hands to collectives: calls and payload bytes by group and kind, to be held against formulas.

The payload is the tensor a rank contributes: the whole tensor of an all-reduce, the own part of an all-gather, the
whole input of a reduce-scatter, the message of a send. What a library then puts on the wire is its own affair (an
all-reduce on a ring sends nearly twice its payload, for one).

Beside the counts, which are always on, each collective can be followed as a flight
(:mod:`drivetrain.engine.parallel.flights`): what it costs in time, and what of that is hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from drivetrain.engine.parallel.flights import Flight, Flights
from drivetrain.engine.parallel.fused_calls import FusedCalls

__all__ = ["Count", "Traffic"]


@dataclass(frozen=True)
class Count:
    """Collectives of one kind in one group."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(self.calls + other.calls, self.bytes + other.bytes)


@dataclass
class Traffic:
    """Counts what passes; an addition of two integers for each collective, always on.

    Attributes:
        counts: by (group, kind): group is a dimension of the mesh ("tp", "dp", ...), kind one of ``all_reduce``,
            ``all_gather``, ``reduce_scatter``, ``broadcast``, ``send``, ``receive``, ``all_to_all``.
        flights: where each collective's times are kept; None: they are not.
        fused_calls: those that are part of a product, which ``counts`` has as well; None: there are none.
    """

    counts: dict[tuple[str, str], Count] = field(default_factory=dict)
    flights: Flights | None = None
    fused_calls: FusedCalls | None = None

    def record(self, group: str, kind: str, bytes: int) -> None:
        """One collective of ``kind`` in ``group`` was handed ``bytes`` of this rank's."""
        key = (group, kind)
        self.counts[key] = self.counts.get(key, Count()) + Count(1, bytes)

    def begin(
        self, group: str, kind: str, bytes: int, process_group: dist.ProcessGroup | None
    ) -> Flight | None:
        """Count a collective that is about to be handed over, and follow it; None where its times are not kept.

        Then ``flights.watched(work, flight)`` notes a work's completion and waits, ``flights.flown`` a whole one.
        To be called on the training thread: counts are not locked.
        What is no work: ``flight.landed()`` when it is complete, ``with flight.waiting():`` around a wait for it.
        """
        self.record(group, kind, bytes)
        return None if self.flights is None else self.flights.begin(group, kind, bytes, process_group)

    def bytes_of(self, group: str, kind: str | None = None) -> int:
        """Bytes handed to collectives of ``group``, of one kind or of all."""
        return sum(
            count.bytes
            for (name, what), count in self.counts.items()
            if name == group and kind in (None, what)
        )

    def bytes_by_group(self) -> dict[str, int]:
        """Bytes handed to the collectives of each group so far."""
        found: dict[str, int] = {}
        for (group, _), count in self.counts.items():
            found[group] = found.get(group, 0) + count.bytes
        return found

    def take(self) -> Mapping[tuple[str, str], Count]:
        """What was counted since the last call; counting begins anew."""
        counts, self.counts = self.counts, {}
        return counts
