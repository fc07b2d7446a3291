"""What becomes of each argument of a source: one of four lists, and none is left out."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.config.importing.arguments import Argument, Effect, Known, Source, nearest_name

__all__ = ["Conversion", "Lacking", "Same", "Taken", "Unknown"]

_TRUE = {"true": True, "false": False, "True": True, "False": False}


@dataclass(frozen=True)
class Taken:
    """Taken over. ``given``: the source's words; ``field``, ``value``: ours; ``rule``: how one becomes the other."""

    name: str
    given: str
    field: str
    value: Any
    rule: str


@dataclass(frozen=True)
class Same:
    """The same here without it, or without meaning here."""

    name: str
    given: str
    reason: str


@dataclass(frozen=True)
class Lacking:
    """Not supported here. ``effect``: what leaving it out changes; ``reason``: in words."""

    name: str
    given: str
    effect: Effect
    reason: str


@dataclass(frozen=True)
class Unknown:
    """No known argument of the source's trainer."""

    name: str
    given: str
    nearest: str | None


@dataclass
class Conversion:
    """A configuration in the making.

    Attributes:
        source: what is converted.
        values: our leaves, by dotted path.
        origins: argument that decided each, in words.
        defaults: leaves that the source's own defaults decide.
        problems: values that cannot be read, and arguments that contradict each other.
        remarks: what the source's arguments leave open, that no argument stands for.
    """

    source: Source
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)
    defaults: list[Taken] = field(default_factory=list)
    same: list[Same] = field(default_factory=list)
    lacking: list[Lacking] = field(default_factory=list)
    unknown: list[Unknown] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[Lacking] = field(default_factory=list)
    _done: set[str] = field(default_factory=set)

    # -- reading ------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether the argument was given; for a switch, whether it is on."""
        argument = self.source.arguments.get(name)
        return argument is not None and argument.values[:1] not in (("false",), ("False",))

    def words(self, name: str) -> tuple[str, ...]:
        """Its words; empty where it was not given."""
        argument = self.source.arguments.get(name)
        return () if argument is None else argument.values

    def unreadable(self, name: str) -> tuple[str, ...]:
        """Why its value is unknown; empty: it is known, or was not given."""
        argument = self.source.arguments.get(name)
        return () if argument is None else argument.missing

    def text(self, name: str, default: str | None = None) -> str | None:
        """Its one word."""
        found: str | None = self._read(name, default, str, "one word")
        return found

    def whole(self, name: str, default: int | None = None) -> int | None:
        """A whole number; ``1e6`` and ``1_000`` are some."""
        found: int | None = self._read(name, default, _whole, "a whole number")
        return found

    def number(self, name: str, default: float | None = None) -> float | None:
        """A number."""
        found: float | None = self._read(name, default, _number, "a number")
        return found

    def choice(self, name: str, known: Sequence[str], default: str | None = None) -> str | None:
        """One of ``known``; anything else is a problem that names them."""
        found = self.text(name, default)
        if found is not None and found != default and found not in known:
            self.problems.append(f"{name} {found}: expected one of {', '.join(known)}")
            return default
        return found

    def _read(self, name: str, default: Any, kind: Callable[[str], Any], words: str) -> Any:
        argument = self.source.arguments.get(name)
        if argument is None:
            return default
        if argument.missing:
            self._problem(
                f"{name} {argument.given}: its value is unknown, {' and '.join(argument.missing)}; give it with --set "
                "NAME=VALUE, or write the value into the file"
            )
            return default
        if len(argument.values) != 1:
            given = f"got {argument.given!r}" if argument.values else "got none"
            self._problem(f"{name}: expected {words}, {given}")
            return default
        try:
            return kind(argument.values[0])
        except ValueError:
            self._problem(f"{name} {argument.values[0]}: expected {words}")
            return default

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    # -- deciding -----------------------------------------------------------------------------------------------

    def set(self, path: str, value: Any, name: str, rule: str) -> None:
        """Our leaf ``path`` becomes ``value``, by the argument ``name``, or by the source's default of it."""
        self.values[path] = value
        argument = self.source.arguments.get(name)
        if argument is None:
            self.origins[path] = f"the default of {name}"
            self.defaults.append(Taken(name, "", path, value, rule))
            return
        self.origins[path] = name
        self._done.add(name)
        self.taken.append(Taken(name, argument.given, path, value, rule))

    def also(self, name: str, path: str, rule: str) -> None:
        """A further argument that has a part in what ``path`` has become."""
        argument = self.source.arguments.get(name)
        if argument is not None and name not in self._done:
            self._done.add(name)
            self.taken.append(Taken(name, argument.given, path, self.values.get(path), rule))

    def drop(self, name: str, reason: str) -> None:
        """An argument that needs nothing here."""
        argument = self.source.arguments.get(name)
        if argument is not None and name not in self._done:
            self._done.add(name)
            self.same.append(Same(name, argument.given, reason))

    def lack(self, name: str, effect: Effect, reason: str) -> None:
        """An argument that cannot be taken over; one that was not given is remarked all the same."""
        argument = self.source.arguments.get(name)
        if argument is None:
            self.remark(f"{name} (absent)", effect, reason)
        elif name not in self._done:
            self._done.add(name)
            self.lacking.append(Lacking(name, argument.given, effect, reason))

    def remark(self, name: str, effect: Effect, reason: str) -> None:
        """What follows from several arguments, or from one that was not given."""
        self.remarks.append(Lacking(name, "", effect, reason))

    def settle(self, known: Callable[[str], Known | None]) -> None:
        """Every argument that no rule took: by what is known of its name."""
        for name, argument in self.source.arguments.items():
            if name in self._done:
                continue
            self._done.add(name)
            found = known(name)
            if found is None:
                self.unknown.append(Unknown(name, argument.given, nearest_name(name, self.source.trainer)))
            elif found.effect == "same":
                self.same.append(Same(name, argument.given, found.reason))
            elif found.effect == "converted":
                self.same.append(Same(name, argument.given, "it decides nothing beside the other arguments"))
            elif _is_inert(argument, found):
                self.same.append(Same(name, argument.given, "it is what it would be without being given"))
            else:
                self.lacking.append(Lacking(name, argument.given, found.effect, found.reason))
        for argument in self.source.repeated:
            self.same.append(
                Same(argument.name, argument.given, "it is given again later, and the last one counts")
            )
        for argument in self.source.launcher:
            self.same.append(
                Same(argument.name, argument.given, "the launcher's: processes are started by drivetrain")
            )
        for word, reason in self.source.lost:
            self.remark(word, "curve", reason)
        for word, reason in self.source.notes:
            self.same.append(Same(word, "", reason))


def _is_inert(argument: Argument, known: Known) -> bool:
    """Whether it was given the value that it has anyway."""
    if known.is_negative:
        return False
    if not argument.values:
        return known.default == "true"
    if argument.values[:1] in (("false",), ("False",), ("none",), ("None",), ("null",)):
        return True
    return known.default is not None and all(_equal(word, known.default) for word in argument.values)


def _equal(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def _whole(text: str) -> int:
    if re.fullmatch(r"[+-]?\d[\d_]{0,30}", text):
        return int(text)
    value = _number(text)
    if not value.is_integer() or abs(value) > 2**63:
        raise ValueError(text)
    return int(value)


def _number(text: str) -> float:
    # Not float() alone, which takes nan and infinity.
    if not re.fullmatch(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d{1,4})?", text):
        raise ValueError(text)
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(text)
    return value
