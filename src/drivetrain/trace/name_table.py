"""Name tables: what a kernel, an operator, a copy, a process group or a range belongs to, as versioned data files.

A table is a TOML file of ordered rules; the first rule whose regular expression is found in the name decides.
``names/<version>/`` holds the tables of one version; a version that has been published is not edited but followed
by the next, so that two accounts with the same :attr:`NameTable.identity` classed the same names the same way.
A user's file has the same form and comes before everything else.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from drivetrain.errors import DataError
from drivetrain.measure.account import HOST_CAUSES
from drivetrain.trace.classes import CLASSES, COLLECTIVE_KINDS, GROUP_LABELS

__all__ = ["CAUSES", "LATEST_VERSION", "SIDES", "Context", "NameTable", "Rule", "table_versions"]

LATEST_VERSION = "1"
"""The version :meth:`NameTable.load` takes when none is named."""

_FOLDER = Path(__file__).parent / "names"

CAUSES: tuple[str, ...] = tuple(name for name in HOST_CAUSES if name not in ("host.launch", "host.python"))
"""Causes that a name tells, in the order in which they take time. That work is being launched, or that other code of
the training runs, tells the kind of the record."""

CAUSE_LABELS: tuple[str, ...] = (*CAUSES, "copy.h2d")
"""What the ``cause`` side may give: a cause, or the copy of a batch in a run whose device records none."""

SIDES: Mapping[str, tuple[str, ...]] = {
    "device": CLASSES,
    "copy": CLASSES,
    "host": CLASSES,
    "group": GROUP_LABELS,
    "collective": COLLECTIVE_KINDS,
    "cause": CAUSE_LABELS,
    "recompute": ("backward", "frame", "annotation", "reentrant", "forward_only"),
}
"""What a table may class, and the classes it may give: names of kernels, of copy records, of operators and ranges on
the host; process groups; words for collectives; causes of idleness; marks of recomputation."""

_RULE_KEYS = frozenset({"class", "pattern", "kind", "library", "weak", "examples", "flags", "side"})
_CONTEXT_KEYS = frozenset({"class", "pattern", "examples", "categories", "covers"})
_FILE_KEYS = frozenset({"schema", "table", "side", "rule", "context"})


@dataclass(frozen=True)
class Rule:
    """One line of a table."""

    label: str
    """The class it gives: one of ``SIDES[side]``."""
    expression: str
    """The regular expression, as the file gives it."""
    ignore_case: bool
    kind: str | None
    """The collective a communication kernel runs, where its name tells."""
    library: str
    """Where such names come from: ``nccl``, ``cutlass``, ``aten``, …"""
    weak: bool
    """The name tells a generic device function; the launching operator may tell a narrower class."""
    examples: tuple[str, ...]
    """Real names this rule decides; a test holds every rule to them."""
    source: str
    """``file:number`` of the rule, for messages."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Searched for anywhere in the name. Compiled when first asked for: an account needs part of the rules only.

        Raises:
            DataError: it is no regular expression.
        """
        return _compiled(self.expression, self.ignore_case, self.source)


@dataclass(frozen=True)
class Context:
    """A range on the host that decides the class of what is launched, or runs, within it."""

    label: str
    pattern: re.Pattern[str]
    categories: tuple[str, ...]
    """``operator``, ``annotation`` or both: the records the pattern is held against."""
    covers: tuple[str, ...]
    """Classes it overrides."""
    examples: tuple[str, ...]


@dataclass(frozen=True)
class NameTable:
    """All tables of one version, the user's rules in front."""

    version: str
    rules: Mapping[str, tuple[Rule, ...]]
    """Rules by side, in order."""
    contexts: tuple[Context, ...]
    digest: str
    """SHA-256 over the files read, first 12 hexadecimal digits."""

    @classmethod
    def load(cls, version: str | None = None, user_file: str | Path | None = None) -> "NameTable":
        """The tables of a version (default: the latest), preceded by the rules of a user's file.

        Raises:
            DataError: an unknown version; a user's file that is missing, no TOML, or has an unknown key, class,
                collective or an invalid regular expression (the message says which and what is legal).
        """
        name = LATEST_VERSION if version is None else version
        if name not in table_versions():
            raise DataError(f"no name tables of version {name!r}; there are: {', '.join(table_versions())}")
        paths = sorted((_FOLDER / name).glob("*.toml"), key=lambda path: _READING_ORDER.index(path.stem))
        user_path = None if user_file is None else Path(user_file)
        if user_path is not None:
            paths.insert(0, user_path)
        digest = hashlib.sha256()
        rules: dict[str, list[Rule]] = {side: [] for side in SIDES}
        contexts: list[Context] = []
        for path in paths:
            content = _read(path)
            digest.update(content)
            side, file_rules, file_contexts = _parse(path, content)
            if (
                path == user_path
            ):  # Ours are compiled when they are asked for; a user's mistake is told at once.
                _ = [rule.pattern for _, rule in file_rules]
            for rule_side, rule in file_rules:
                rules[rule_side or side].append(rule)
            contexts.extend(file_contexts)
        ordered = {side: tuple(found) for side, found in rules.items()}
        return cls(name, ordered, tuple(contexts), digest.hexdigest()[:12])

    @property
    def identity(self) -> str:
        """``<version>+<digest>``: changes whenever any rule does."""
        return f"{self.version}+{self.digest}"

    def find(self, side: str, name: str) -> Rule | None:
        """The first rule of a side whose pattern occurs in a name; None when there is none."""
        for rule in self.rules[side]:
            if rule.pattern.search(name):
                return rule
        return None

    def label(self, side: str, name: str) -> str | None:
        """The class the first matching rule of a side gives to a name."""
        rule = self.find(side, name)
        return None if rule is None else rule.label

    @cached_property
    def recompute_marks(self) -> Mapping[str, tuple[re.Pattern[str], ...]]:
        """Patterns of the ``recompute`` side by mark."""
        marks: dict[str, list[re.Pattern[str]]] = {mark: [] for mark in SIDES["recompute"]}
        for rule in self.rules["recompute"]:
            marks[rule.label].append(rule.pattern)
        return {mark: tuple(patterns) for mark, patterns in marks.items()}


# Communication first: "ncclDevKernel_ReduceScatter" must not be read as a reduction.
_READING_ORDER = (
    "communication",
    "compute",
    "copies",
    "operators",
    "host",
    "groups",
    "collectives",
    "causes",
    "recompute",
)


def table_versions() -> tuple[str, ...]:
    """Versions there are tables of, oldest first."""
    return tuple(sorted((path.name for path in _FOLDER.iterdir() if path.name.isdigit()), key=int))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"name table {path}: {error.strerror or error}") from error


def _parse(path: Path, content: bytes) -> tuple[str, list[tuple[str | None, Rule]], list[Context]]:
    try:
        document = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"name table {path}: not TOML: {error}") from error
    _known_keys(document, _FILE_KEYS, str(path))
    if document.get("schema", 1) != 1:
        raise DataError(
            f"name table {path}: schema {document['schema']!r} is not known; this version reads schema 1"
        )
    side = document.get("side", "device")
    _one_of(side, SIDES, f"{path}: side")
    rules = [
        _rule(entry, side, f"{path.name}:{i}") for i, entry in enumerate(_tables(document, "rule", path), 1)
    ]
    contexts = [
        _context(entry, f"{path.name}: context {i}")
        for i, entry in enumerate(_tables(document, "context", path), 1)
    ]
    return side, rules, contexts


def _tables(document: Mapping[str, Any], key: str, path: Path) -> Sequence[Mapping[str, Any]]:
    entries = document.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"name table {path}: write [[{key}]], one table a {key}")
    return entries


def _rule(entry: Mapping[str, Any], file_side: str, where: str) -> tuple[str | None, Rule]:
    _known_keys(entry, _RULE_KEYS, where)
    side = entry.get("side")
    if side is not None:
        _one_of(side, SIDES, f"{where}: side")
    label = _text(entry, "class", where)
    _one_of(label, SIDES[side or file_side], f"{where}: class")
    kind = entry.get("kind")
    if kind is not None:
        _one_of(kind, COLLECTIVE_KINDS, f"{where}: kind")
    return side, Rule(
        label=label,
        expression=_text(entry, "pattern", where),
        ignore_case=_ignores_case(entry.get("flags", ""), where),
        kind=kind,
        library=str(entry.get("library", "user")),
        weak=bool(entry.get("weak", False)),
        examples=_texts(entry, "examples", where),
        source=where,
    )


def _context(entry: Mapping[str, Any], where: str) -> Context:
    _known_keys(entry, _CONTEXT_KEYS, where)
    label = _text(entry, "class", where)
    _one_of(label, CLASSES, f"{where}: class")
    categories = _texts(entry, "categories", where) or ("annotation", "operator")
    for category in categories:
        _one_of(category, ("annotation", "operator"), f"{where}: categories")
    covers = _texts(entry, "covers", where) or tuple(name for name in CLASSES if name.startswith("compute."))
    for covered in covers:
        _one_of(covered, CLASSES, f"{where}: covers")
    pattern = _compiled(_text(entry, "pattern", where), False, where)
    return Context(label, pattern, categories, covers, _texts(entry, "examples", where))


def _ignores_case(flags: object, where: str) -> bool:
    if flags not in ("", "i"):
        raise DataError(f'name table {where}: flags = {flags!r}; only "i" (ignore case) is known')
    return flags == "i"


def _compiled(text: str, ignore_case: bool, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise DataError(f"name table {where}: {text!r} is no regular expression: {error}") from error


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise DataError(f"name table {where}: {key} is missing or no text")
    return value


def _texts(entry: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    values = entry.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise DataError(f"name table {where}: {key} is no list of texts")
    return tuple(values)


def _known_keys(entry: Mapping[str, Any], legal: frozenset[str], where: str) -> None:
    for key in entry:
        _one_of(key, legal, f"{where}: key")


def _one_of(value: object, legal: Iterable[str], where: str) -> None:
    words = tuple(sorted(legal))
    if value not in words:
        from drivetrain.config.suggest import nearest  # Only a wrong word pays for the schema.

        close = nearest(str(value), words)
        hint = f"; did you mean {close!r}?" if close else ""
        raise DataError(f"name table {where} {value!r} is not known{hint} Legal: {', '.join(words)}")
