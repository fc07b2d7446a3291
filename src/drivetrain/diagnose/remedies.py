"""The catalogue's answer to a cause: entries that cure it or treat its class, and are not requested already."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drivetrain.catalogue import catalogue, entry, entry_of_field
from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.time_models import TimeFacts
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Remedy
from drivetrain.measure.optimisation import Prediction

__all__ = [
    "UNKNOWN_SETTINGS",
    "Answer",
    "entries_for",
    "remedies_against",
    "remedies_for",
    "setting_remedy",
    "switch_off",
    "treats",
]

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
    return _answer(facts, entries_for(classes), cost_ns)


def remedies_against(facts: Facts, cause: str, cost_ns: float | None, *, beside: bool = False) -> Answer:
    """What the catalogue has against one cause: the entries that name it.

    Args:
        beside: the cost lies between the steps, not in them.
    """
    return _answer(facts, [one for one in catalogue() if cause in one.cures], cost_ns, beside=beside)


def _answer(
    facts: Facts, entries: Sequence[Optimisation], cost_ns: float | None, *, beside: bool = False
) -> Answer:
    found: list[Remedy] = []
    requested: list[str] = []
    without: list[str] = []
    for one in entries:
        note = None
        change = None
        if facts.config is None or facts.launch is None:
            if one.name in facts.in_use:
                requested.append(one.name)
                continue
            if one.name in facts.ruled_out:
                without.append(f"{one.name}: {facts.ruled_out[one.name]}")
                continue
            note = UNKNOWN_SETTINGS
        elif one.requested(facts.config) and one.applies(facts.config, facts.launch) is None:
            idle = any(record.name == one.name and record.without_effect for record in facts.records)
            requested.append(f"{one.name} (without effect)" if idle else _with_knobs(one))
            continue
        else:
            change = one.on(facts.config, facts.launch)
            if change is None:
                reason = one.applies(facts.config, facts.launch)
                without.append(f"{one.name}: {reason or 'it can have no effect here'}")
                continue
        ratio = _bound(facts, cost_ns, cost_ns, beside=beside)
        found.append(_predicted(facts, Remedy(one.name, one.field, change, one.numerics, ratio, note), one))
    return tuple(found), None if found else _why_none(requested, without), tuple(requested)


def _predicted(facts: Facts, remedy: Remedy, one: Optimisation) -> Remedy:
    """With what the entry itself expects of the move, where the configuration is known and it has a model."""
    if facts.config is None or facts.launch is None:
        return remedy
    price = None if one.device_bytes is None else one.device_bytes(facts.config, facts.launch)
    assert remedy.change is not None
    found = one.expects(_time_facts(facts, facts.config, facts.launch), _after(facts.config, remedy.change))
    # What carries loss is counted by no finding's cost.
    prediction = found if isinstance(found, Prediction) and found.of == "tokens_per_second" else None
    if prediction is not None and prediction.memory_bytes is not None:
        price = prediction.memory_bytes
    if prediction is not None and remedy.ratio is not None and prediction.ratio > remedy.ratio:
        # The entry speaks of the whole account: of a finding that is a part of a class it can gain the part alone.
        rule = f"{prediction.rule}; no more than the cost of this finding"
        prediction = replace(prediction, ratio=remedy.ratio, rule=rule, low=None, high=None)
    return Remedy(
        remedy.name,
        remedy.field,
        remedy.change,
        remedy.numerics,
        remedy.ratio,
        remedy.note,
        None if prediction is None else prediction.ratio,
        None if prediction is None else prediction.rule,
        price,
    )


def _time_facts(facts: Facts, config: RunConfig, launch: LaunchFacts) -> TimeFacts:
    """What models of time may look at, of what a diagnosis knows."""
    if facts.time is not None:
        return facts.time
    return TimeFacts(
        facts.account,
        config,
        launch,
        communication=facts.communication,
        data_operations=facts.data_operations,
    )


def _after(config: RunConfig, change: Mapping[str, Any]) -> RunConfig:
    """A configuration after a change that an entry proposes, whose values are legal."""
    document = config.model_dump()
    for path, value in change.items():
        section, _, name = path.partition(".")
        document[section][name] = value
    return RunConfig.model_validate(document)


def setting_remedy(
    facts: Facts,
    change: Mapping[str, Any],
    cost_ns: float | None,
    *,
    saved_ns: float | None = None,
    rule: str | None = None,
    numerics: str | None = None,
    note: str | None = None,
    memory_bytes: int | None = None,
    beside: bool = False,
) -> Remedy:
    """Another value of a leaf: a knob of an entry where it is one, else a setting that no entry requests.

    Args:
        facts: for the mean step.
        change: leaf → value; the first leaf says whose it is.
        cost_ns: of the finding.
        saved_ns: of it, what this value is expected to save, by `rule`.
        rule: how `saved_ns` was computed.
        numerics: the gate; None: the entry's.
        note: what else is to be known.
        memory_bytes: change of a device's peak.
        beside: the cost lies between the steps, not in them.
    """
    field = next(iter(change))
    owner = entry_of_field(field)
    gate = numerics or (None if owner is None else owner.numerics)
    assert gate is not None, f"{field} has no entry, and so no gate of its own"
    assert (saved_ns is None) == (rule is None)
    return Remedy(
        name=None if owner is None else owner.name,
        field=field,
        change=dict(change) if facts.config is not None else None,
        numerics=gate,
        ratio=_bound(facts, cost_ns, cost_ns, beside=beside),
        note=note,
        estimate=_bound(facts, cost_ns, saved_ns, beside=beside),
        estimate_rule=rule,
        memory_bytes=memory_bytes,
    )


def switch_off(facts: Facts, name: str, cost_ns: float | None, note: str) -> Remedy:
    """The move that takes an entry away, for a cause that it is itself."""
    one = entry(name)
    return Remedy(
        name=one.name,
        field=one.field,
        change=None if facts.config is None else one.off(facts.config),
        numerics=one.numerics,
        ratio=_bound(facts, cost_ns, cost_ns),
        note=note,
        estimate=_bound(facts, cost_ns, cost_ns),
        estimate_rule="the whole cost of the finding disappears with it" if cost_ns is not None else None,
    )


def _bound(
    facts: Facts, cost_ns: float | None, saved_ns: float | None, *, beside: bool = False
) -> float | None:
    """Step time before over after if of a cost so much disappeared; None where that is unknown, or the whole step."""
    if cost_ns is None or saved_ns is None:
        return None
    whole = facts.mean.window_ns + (cost_ns if beside else 0.0)
    return whole / (whole - saved_ns) if 0 <= saved_ns < whole else None


def _with_knobs(entry: Optimisation) -> str:
    """What is on may still be set otherwise."""
    knobs = ", ".join(f"{knob.field} from {knob.low:g} to {knob.high:g}" for knob in entry.knobs)
    return f"{entry.name}, to be tuned by {knobs}" if knobs else entry.name


def _why_none(requested: Sequence[str], without: Sequence[str]) -> str:
    if requested or without:
        parts = [f"{', '.join(requested)} asked for already"] if requested else []
        return f"no further entry of the catalogue treats it ({'; '.join([*parts, *without])})"
    return "no entry of the catalogue treats it"
