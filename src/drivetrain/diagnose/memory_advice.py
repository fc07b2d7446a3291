"""What the largest categories of memory suggest: entries of the catalogue that make them smaller, and layouts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.catalogue import catalogue
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.memory import MemoryByCategory, dominant

__all__ = ["Suggestion", "suggestions"]

_SHARED_FROM_STAGE: Mapping[str, int] = {"optimizer": 1, "gradients": 2, "parameters": 3}
"""``parallelism.zero_stage`` from which data-parallel ranks share a category."""


@dataclass(frozen=True)
class Suggestion:
    """What could be done about one category.

    Attributes:
        category: that holds a large part of the peak.
        share: which.
        by: the entry of the catalogue, or the layout's field.
        change: leaf → value; None: nothing to change here.
        note: what it does, or why there is nothing to change.
    """

    category: str
    share: float
    by: str
    change: Mapping[str, Any] | None
    note: str

    def to_document(self) -> dict[str, Any]:
        """As ``--json`` shows it."""
        return {
            "category": self.category,
            "share": self.share,
            "by": self.by,
            "change": None if self.change is None else dict(self.change),
            "note": self.note,
        }


def suggestions(memory: MemoryByCategory, config: RunConfig, launch: LaunchFacts) -> tuple[Suggestion, ...]:
    """One or more for each category that holds a fifth of the peak, the largest first."""
    found: list[Suggestion] = []
    for category in dominant(memory):
        share = memory.at_peak[category] / memory.peak_bytes
        of_this = [*_entries(category, share, config, launch), *_layout(category, share, config, launch)]
        found += of_this or [
            Suggestion(category, share, "nothing", None, "no entry of the catalogue makes it smaller")
        ]
    return tuple(found)


def _entries(category: str, share: float, config: RunConfig, launch: LaunchFacts) -> list[Suggestion]:
    found = []
    for entry in catalogue():
        if category not in entry.relieves:
            continue
        idle = entry.applies(config, launch)
        if entry.requested(config) and idle is None:
            found.append(
                Suggestion(category, share, entry.name, None, f"is requested already: {entry.summary}")
            )
            continue
        change = entry.on(config, launch)
        note = entry.summary if change is not None else idle or "it can have no effect here"
        found.append(Suggestion(category, share, entry.name, change, note))
    return found


def _layout(category: str, share: float, config: RunConfig, launch: LaunchFacts) -> list[Suggestion]:
    stage = _SHARED_FROM_STAGE.get(category)
    if stage is None or config.parallelism.zero_stage >= stage:
        return []
    field = "parallelism.zero_stage"
    if launch.world_size == 1:
        return [
            Suggestion(category, share, field, None, f"{stage} shares it, over several data-parallel ranks")
        ]
    return [
        Suggestion(
            category, share, field, {field: stage}, "data-parallel ranks share it instead of each holding it"
        )
    ]
