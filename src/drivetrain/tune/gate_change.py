"""By which tier a change is judged: what it is, and what its catalogue entry claims of the numbers."""

from collections.abc import Mapping
from typing import Any

from drivetrain.archive.origin import RunOrigin, change_between
from drivetrain.archive.reader import Run
from drivetrain.catalogue import catalogue, entry_of_field, move_between
from drivetrain.config import RunConfig
from drivetrain.errors import RunError
from drivetrain.tune.gate import TIERS, Tier
from drivetrain.tune.layouts import LAYOUT_LEAVES

__all__ = ["change_of", "tier_of_change"]


def change_of(baseline: Run, candidate: Run) -> dict[str, Any]:
    """Leaf → value in the candidate, of every leaf that differs and is no identity.

    Raises:
        RunError: the candidate was declared as a change of this baseline, and differs in something else.
    """
    found = change_between(baseline.config(), candidate.config())
    origin = RunOrigin.from_manifest(candidate.manifest)
    if origin.parent == baseline.id and origin.change is not None and dict(origin.change) != found:
        other = sorted(
            leaf
            for leaf in {*found, *origin.change}
            if found.get(leaf, _NOTHING) != origin.change.get(leaf, _NOTHING)
        )
        raise RunError(
            f"{candidate.path.name} was declared as a change of {', '.join(origin.change) or 'nothing'} of "
            f"{baseline.path.name}, and they differ otherwise: {', '.join(other)}"
        )
    return found


_NOTHING = object()


def tier_of_change(
    change: Mapping[str, Any], configs: tuple[RunConfig, RunConfig] | None = None
) -> tuple[Tier, str]:
    """The tier and, in words, why it is that one.

    No difference, and a leaf that no catalogue entry has, claim that no number changes.

    Args:
        configs: of baseline and candidate, by which a declared move of several leaves is known.

    Raises:
        RunError: leaves that belong neither to one entry nor to one move.
    """
    if not change:
        return "exact", "nothing differs, so no number may"
    entries = {leaf: entry_of_field(leaf) for leaf in change}
    owners = {entry.name for entry in entries.values() if entry is not None}
    if len(owners) == 1 and None not in entries.values():
        entry = next(entry for entry in entries.values() if entry is not None)
        return entry.numerics, f"the catalogue says that {entry.name} is {entry.numerics}"
    if LAYOUT_LEAVES.issuperset(change):
        return "round-off", "another layout of the processes adds the same numbers in another order"
    pair = _searched_together(change)
    if pair is not None:
        return pair
    found = None if configs is None else move_between(*configs, change)
    if found is not None:
        entry, move, words = found
        return move.numerics, (
            f"one declared change, the move {move.name} of {entry.name} ({words}), which the catalogue says is "
            f"{move.numerics}"
        )
    if len(change) == 1:
        leaf = next(iter(change))
        return "exact", (
            f"no catalogue entry has {leaf}, so it claims to change no number; declare another tier with --tier"
        )
    raise RunError(
        f"the runs differ in several leaves that do not belong together ({', '.join(change)}): compare one change at "
        "a time, or declare what the bundle may do to the numbers with --tier"
    )


def _searched_together(change: Mapping[str, Any]) -> tuple[Tier, str] | None:
    """The tier of two knobs that an entry declares to interact; None where the change is none of them."""
    for one in catalogue():
        for fields in one.interacts_with:
            if set(fields) != set(change):
                continue
            owners = [owner for field in fields if (owner := entry_of_field(field)) is not None]
            names = " and ".join(dict.fromkeys(owner.name for owner in owners))
            tier = max((owner.numerics for owner in owners), key=TIERS.index)
            return (
                tier,
                f"knobs that are searched together, and the catalogue says that {names} is {tier} at most",
            )
    return None
