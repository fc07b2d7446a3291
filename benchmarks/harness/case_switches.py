"""All switches on: what somebody does who has read that each of them makes training faster."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from drivetrain.catalogue import catalogue
from drivetrain.catalogue.rules import all_rules
from drivetrain.config import LaunchFacts, RunConfig, violations
from drivetrain.errors import ConfigurationError
from drivetrain.tune.moves import Change, changed

__all__ = ["all_switched_on"]


def all_switched_on(
    config: RunConfig,
    world_size: int,
    *,
    only: Collection[str] = (),
    missing: Callable[[str], str | None],
) -> tuple[RunConfig, dict[str, Any], list[str]]:
    """``config`` with each entry of the catalogue on that treats time of a step.

    By name, each on top of those before it. Left out is what the machine lacks, what breaks a rule, and what would
    take back a field that another has set. What saves memory alone is no switch for speed, and is left out too.

    Args:
        only: names of entries; empty: all.
        missing: capability → None, or why this machine lacks it.

    Returns:
        The configuration, the leaves that were changed, and the names of the entries.
    """
    facts = LaunchFacts(world_size=world_size)
    leaves: dict[str, Any] = {}
    names = []
    for entry in catalogue():
        if (only and entry.name not in only) or not entry.treats:
            continue
        if entry.capability is not None and missing(entry.capability) is not None:
            continue
        wanted: Mapping[str, Any] | None = entry.on(config, facts)
        if not wanted or set(wanted) & set(leaves):
            continue
        try:
            after = changed(config, Change(dict(wanted), entry.name))
        except ConfigurationError:
            continue
        if violations(after, facts, all_rules()):
            continue
        config = after
        leaves |= wanted
        names.append(entry.name)
    return config, leaves, names
