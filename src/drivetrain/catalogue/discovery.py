"""Finding the entries: each module of this package that has an ``ENTRY``."""

import functools
import importlib
import itertools
import pkgutil
from collections.abc import Collection

from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.move import Move
from drivetrain.config import RunConfig, nearest
from drivetrain.config.leaves import leaves
from drivetrain.errors import DrivetrainError
from drivetrain.measure.account import CLASS_GROUPS, CLASSES
from drivetrain.measure.memory import CATEGORIES

__all__ = ["catalogue", "entry", "entry_of_field", "move_between"]

_PACKAGE = "drivetrain.catalogue"


@functools.cache
def catalogue() -> tuple[Optimisation, ...]:
    """All entries, by name. An entry that contradicts the schema or another one is our own defect: AssertionError."""
    package = importlib.import_module(_PACKAGE)
    modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    found = []
    for module in modules:
        candidate = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), "ENTRY", None)
        if candidate is None:
            continue
        assert isinstance(candidate, Optimisation), f"{module}.ENTRY is no Optimisation"
        assert candidate.name == module, f"the entry {candidate.name} is in {module}.py"
        found.append(candidate)
    _validate(found)
    return tuple(found)


def _validate(entries: list[Optimisation]) -> None:
    names = {one.name for one in entries}
    for first, second in itertools.combinations(entries, 2):
        # Values of one choice: they exclude each other, and the gate asks the field what it does to the numbers.
        assert first.field != second.field or (
            {first.name, second.name} & {*first.conflicts, *second.conflicts}
            and first.numerics == second.numerics
        ), f"two entries of one field, which neither exclude each other nor do the same: {first.field}"
    for one in entries:
        unknown = {one.field, *(knob.field for knob in one.knobs)} - leaves().keys()
        assert not unknown, f"{one.name}: no such leaf: {sorted(unknown)}"
        _validate_knobs(one, entries)
        assert names >= set(one.conflicts), f"{one.name} conflicts with an unknown entry"
        assert one.name not in one.conflicts
        no_class = [treated for treated in one.treats if treated not in (*CLASSES, *CLASS_GROUPS)]
        assert not no_class, f"{one.name} treats what is no class of an account: {no_class}"
        assert set(one.relieves) <= set(CATEGORIES), f"{one.name} relieves what is no category of memory"
        assert len({move.name for move in one.moves}) == len(one.moves), f"{one.name}: two moves of one name"
        for move in one.moves:
            no_leaf = sorted(move.leaves - leaves().keys())
            assert not no_leaf, f"{one.name}, {move.name}: no such leaf: {no_leaf}"
            no_class = [treated for treated in move.treats if treated not in (*CLASSES, *CLASS_GROUPS)]
            assert not no_class, f"{one.name}, {move.name} treats what is no class of an account: {no_class}"
        assert one.evidence_rule, f"{one.name} does not say what its evidence goes by"


def _validate_knobs(one: Optimisation, entries: list[Optimisation]) -> None:
    own = {knob.field for knob in one.knobs}
    every = {knob.field for other in entries for knob in other.knobs}
    for knob in one.knobs:
        no_class = [treated for treated in knob.treats or () if treated not in (*CLASSES, *CLASS_GROUPS)]
        assert not no_class, f"{one.name}, {knob.field} treats what is no class of an account: {no_class}"
    for first, second in one.interacts_with:
        assert first in own, f"{one.name} has no knob {first}"
        assert second in every - {first}, f"{one.name}: {first} interacts with no knob {second}"


def entry(name: str) -> Optimisation:
    """The entry called ``name``.

    Raises:
        DrivetrainError: there is none; the message names the nearest.
    """
    known = {one.name: one for one in catalogue()}
    if name in known:
        return known[name]
    close = nearest(name, list(known))
    hint = f"did you mean {close}?" if close is not None else f"there are: {', '.join(known)}"
    raise DrivetrainError(f"no optimisation is called {name!r}; {hint}")


def entry_of_field(field: str) -> Optimisation | None:
    """The entry that a configuration leaf requests, or whose knob it is; None where no entry has it. Of entries that
    are values of one choice the first: they do the same to the numbers."""
    owners = [one for one in catalogue() if one.field == field]
    owners += [one for one in catalogue() if any(knob.field == field for knob in one.knobs)]
    return owners[0] if owners else None


def move_between(
    before: RunConfig, after: RunConfig, changed: Collection[str]
) -> tuple[Optimisation, Move, str] | None:
    """The declared move of several leaves that makes one configuration of another, its entry, and it in words.

    Args:
        changed: the leaves that differ and count.

    Returns:
        None where it is no such move. Of several the one with the fewest leaves.
    """
    moves = sorted(
        ((one, move) for one in catalogue() for move in one.moves), key=lambda pair: len(pair[1].leaves)
    )
    for one, move in moves:
        if changed and move.leaves.issuperset(changed):
            words = move.describes(before, after)
            if words is not None:
                return one, move, words
    return None
