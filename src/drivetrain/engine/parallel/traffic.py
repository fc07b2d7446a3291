"""What this rank hands to collectives: calls and payload bytes by group and kind, to be held against formulas.

The payload is the tensor a rank contributes: the whole tensor of an all-reduce, the own part of an all-gather, the
whole input of a reduce-scatter, the message of a send. What a library then puts on the wire is its own affair (gloo's
reduce-scatter is an all-reduce inside, for one).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """

    counts: dict[tuple[str, str], Count] = field(default_factory=dict)

    def record(self, group: str, kind: str, bytes: int) -> None:
        """One collective of ``kind`` in ``group`` was handed ``bytes`` of this rank's."""
        key = (group, kind)
        self.counts[key] = self.counts.get(key, Count()) + Count(1, bytes)

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
