"""The optimisations of one run: put into effect as it asks, and what became of each request.

A request that cannot take effect stops nothing: the run goes on without it, and says so while it runs, in its record
and in its summary.
"""

from collections.abc import Iterator

from drivetrain.catalogue import catalogue
from drivetrain.config import LaunchFacts
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.optimisations.discovery import implementations
from drivetrain.engine.optimisations.implementation import Building, Stage, Status
from drivetrain.measure.optimisation import OptimisationRecord

__all__ = ["Optimisations", "finding_of"]

_NOT_ASKED = Status(active=False)


class Optimisations:
    """What the catalogue's entries are in one run.

    Attributes:
        building: the run while it is built; implementations leave their choices in it.
    """

    def __init__(self, building: Building) -> None:
        self.building = building
        config = building.config
        facts = LaunchFacts(
            world_size=building.num_ranks, local_world_size=min(building.local_world_sizes, default=None)
        )
        self._implementations = implementations()
        self._requested: dict[str, bool] = {}
        self._status: dict[str, Status] = {}
        self._prepared: set[str] = set()
        for entry in catalogue():
            assert entry.name in self._implementations, f"nothing does what the entry {entry.name} says"
            asked = entry.requested(config)
            idle = entry.applies(config, facts) if asked else None
            self._requested[entry.name] = entry.is_asked_for(config, facts)
            self._status[entry.name] = _NOT_ASKED if idle is None else Status(active=False, reason=idle)
            if asked and idle is None:
                self._prepared.add(entry.name)

    def prepare(self, stage: Stage) -> None:
        """Put into effect what belongs to ``stage``."""
        for name in sorted(self._prepared):
            implementation = self._implementations[name]
            if implementation.stage == stage:
                self._status[name] = implementation.prepare(self.building)

    def begin(self, loader: BatchLoader) -> tuple[OptimisationRecord, ...]:
        """The records when the first step is about to begin with batches from ``loader``."""
        self.building.loader = loader
        for name in sorted(self._prepared):
            look = self._implementations[name].at_start
            if look is not None and self._status[name].active:
                self._status[name] = look(self.building)
        return self.records()

    def end(self) -> tuple[OptimisationRecord, ...]:
        """Those records that have become others by now; to be asked once steps were trained."""
        before = {record.name: record for record in self.records()}
        for name in sorted(self._prepared):
            look = self._implementations[name].at_end
            if look is not None and self._status[name].active:
                self._status[name] = look(self.building)
        return tuple(record for record in self.records() if record != before[record.name])

    def records(self) -> tuple[OptimisationRecord, ...]:
        """One of each entry, by name."""
        return tuple(self._records())

    def is_active(self, name: str) -> bool:
        """Whether the entry of that name is in effect."""
        return self._status[name].active

    def findings(self) -> list[str]:
        """A line for each request that is not in effect, or in effect with a reservation."""
        return [text for record in self.records() if (text := finding_of(record)) is not None]

    def _records(self) -> Iterator[OptimisationRecord]:
        for entry in catalogue():
            status = self._status[entry.name]
            yield OptimisationRecord(
                name=entry.name,
                field=entry.field,
                value=entry.effective_value(self.building.config),
                requested=self._requested[entry.name],
                active=status.active,
                reason=status.reason,
                served=status.served,
            )


def finding_of(record: OptimisationRecord) -> str | None:
    """What is to be said of a request that is without effect, or not all that was hoped for; None: nothing."""
    if not record.requested or (record.active and record.reason is None):
        return None
    if not record.active:
        return f"{record.asked} is not in effect: {record.reason}"
    return f"{record.asked} is in effect, but {record.reason}"
