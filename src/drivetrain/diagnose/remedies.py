"""The catalogue's answer to a class of the account: entries that treat it, and are not requested already."""

from collections.abc import Sequence

from drivetrain.catalogue import catalogue
from drivetrain.catalogue.entry import Optimisation
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Remedy

__all__ = ["UNKNOWN_SETTINGS", "Answer", "entries_for", "remedies_for", "treats"]

UNKNOWN_SETTINGS = "the settings of these traces are unknown: it may be in use already"

Answer = tuple[tuple[Remedy, ...], str | None, tuple[str, ...]]
"""Remedies; why there are none, where there are none; names of entries that treat the cause and are requested."""


def entries_for(classes: Sequence[str]) -> tuple[Optimisation, ...]:
    """Entries that treat any of some classes."""
    return tuple(entry for entry in catalogue() if any(treats(entry, name) for name in classes))


def treats(entry: Optimisation, name: str) -> bool:
    """Whether an entry treats a class: it names the class, or its group."""
    return any(name == treated or name.startswith(f"{treated}.") for treated in entry.treats)


def remedies_for(facts: Facts, classes: Sequence[str], cost_ns: float | None) -> Answer:
    """What the catalogue has against the time of some classes.

    Args:
        facts: the configuration in them decides what is requested already.
        classes: of the account.
        cost_ns: what could disappear, of the mean step; None where unknown.
    """
    found: list[Remedy] = []
    requested: list[str] = []
    without: list[str] = []
    for entry in entries_for(classes):
        note = None
        change = None
        if facts.config is None or facts.launch is None:
            if entry.name in facts.in_use:
                requested.append(entry.name)
                continue
            if entry.name in facts.ruled_out:
                without.append(f"{entry.name}: {facts.ruled_out[entry.name]}")
                continue
            note = UNKNOWN_SETTINGS
        elif entry.requested(facts.config) and entry.applies(facts.config, facts.launch) is None:
            idle = any(record.name == entry.name and record.without_effect for record in facts.records)
            requested.append(f"{entry.name} (without effect)" if idle else _with_knobs(entry))
            continue
        else:
            change = entry.on(facts.config, facts.launch)
            if change is None:
                reason = entry.applies(facts.config, facts.launch)
                without.append(f"{entry.name}: {reason or 'it can have no effect here'}")
                continue
        ratio = _bound(facts, cost_ns)
        found.append(Remedy(entry.name, entry.field, change, entry.numerics, ratio, note))
    return tuple(found), None if found else _why_none(requested, without), tuple(requested)


def _with_knobs(entry: Optimisation) -> str:
    """What is on may still be set otherwise."""
    knobs = ", ".join(f"{knob.field} from {knob.low:g} to {knob.high:g}" for knob in entry.knobs)
    return f"{entry.name}, to be tuned by {knobs}" if knobs else entry.name


def _bound(facts: Facts, cost_ns: float | None) -> float | None:
    whole = facts.mean.window_ns
    return whole / (whole - cost_ns) if cost_ns is not None and 0 <= cost_ns < whole else None


def _why_none(requested: Sequence[str], without: Sequence[str]) -> str:
    if requested or without:
        parts = [f"{', '.join(requested)} asked for already"] if requested else []
        return f"no further entry of the catalogue treats it ({'; '.join([*parts, *without])})"
    return "no entry of the catalogue treats it"
