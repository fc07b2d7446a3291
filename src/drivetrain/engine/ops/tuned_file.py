"""What the offline tuner found, read where a run chooses backends. Nothing is timed or written here.

The file is made by ``drivetrain ops tune``; ``docs/ops-tuning.md`` says how, and what its fields mean.
"""

import hashlib
import importlib.util
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drivetrain.engine.ops._operator_code import module_of, operator_code
from drivetrain.engine.ops._tuned_environment import differences, environment_here
from drivetrain.engine.ops._tuned_key import key_of
from drivetrain.engine.ops.signature import Signature
from drivetrain.errors import DrivetrainError, EnvironmentFault
from drivetrain.measure.machine import cache_folder, machine_name

__all__ = ["SCHEMA", "Candidate", "Entry", "TunedFile", "environment_here", "parse_entries", "tuned_path"]

SCHEMA = 1
"""Version of the file's layout. An older reader refuses a newer file."""

_AGAIN = "delete it and tune again: drivetrain ops tune CONFIG"
_ENTRY_HEADER, _CANDIDATE_HEADER = "[[entry]]", "[[entry.candidate]]"


class Candidate(BaseModel):
    """One backend that could have been chosen."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    backend: str = Field(min_length=1)
    rejected: str | None = None
    """Why it was not timed: wrong, crashed, too slow; None where it was."""
    seconds: float | None = Field(default=None, gt=0)
    """Forward and backward of one call through the dispatcher: the least of all rounds."""
    spread: float | None = Field(default=None, ge=0)
    """How far above ``seconds`` the third least of the rounds lies, as a share of it."""
    peak_bytes: int | None = Field(default=None, ge=0)
    """Bytes that forward and backward needed at most beside the arguments; None where that could not be measured."""
    error: float | None = Field(default=None, ge=0)
    """Of the output or gradient that came nearest to its bound: relative root mean square against float64."""
    allowed: float | None = Field(default=None, ge=0)
    """That bound."""
    worst: str | None = None
    """Which output or gradient that was."""


class Entry(BaseModel):
    """What was found of one call."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    operator: str = Field(min_length=1)
    call: str = Field(min_length=1)
    """By which it is found; see ``_tuned_key``."""
    tokens: int = Field(ge=0)
    """With which it was measured."""
    code: str = Field(min_length=1)
    """Of the operator's code at that time; see ``_operator_code``."""
    backend: str = Field(min_length=1)
    """The choice."""
    reason: str = ""
    """Why it was made, in words."""
    calls_per_step: float = Field(ge=0)
    """How often a rank calls it in a step, on average."""
    graded_tokens: tuple[int, ...] = ()
    """Numbers of tokens with which candidates were graded against float64."""
    documents: tuple[int, ...] = ()
    """Lengths of the documents it was measured with, where it has any."""
    candidate: tuple[Candidate, ...] = ()
    """All that could have been chosen, the simplest first."""

    @property
    def name(self) -> tuple[str, int]:
        """What a newer measurement of the same replaces."""
        return self.call, self.tokens


def tuned_path() -> Path:
    """Where this machine's choices are kept: in the folder of its measured ceilings."""
    return cache_folder() / machine_name() / "ops.tuned.toml"


@dataclass
class TunedFile:
    """A tuned file, checked against this process.

    Attributes:
        path: where it was read from.
        hash: SHA-256 of its bytes in 64 hexadecimal digits: the same on all ranks that choose alike.
        environment: where it was made.
        entries: all that it holds.
        foreign: what differs between where it was made and here. With any of it nothing of the file is used, but with
            ``allow_stale``.
        stale: entries whose operator has other code here; they are not used either.
        problems: both in words; empty where all of the file is used.
        misses: calls for which it had no choice, by name, a count each time that it was asked.
    """

    path: Path
    hash: str
    environment: Mapping[str, str]
    entries: tuple[Entry, ...]
    foreign: tuple[str, ...]
    stale: tuple[Entry, ...]
    problems: tuple[str, ...]
    misses: Counter[str] = field(default_factory=Counter)
    _choices: dict[str, dict[int, str]] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        path: Path | str,
        *,
        allow_stale: bool = False,
        environment: Mapping[str, str] | None = None,
        modules: Mapping[str, str] | None = None,
    ) -> Self:
        """Read and check a file.

        Args:
            allow_stale: use what was made elsewhere, or with other code, all the same; it is still said.
            environment: of this process, as :func:`environment_here` gives it; absent: that, as it is now. A run asks
                after it has set its threads.
            modules: where operators live, by name; absent: in this package.

        Raises:
            EnvironmentFault: there is no such file, or it cannot be read.
            DrivetrainError: it is damaged, or of a newer version; the message names the line.
        """
        path = Path(path)
        content = _content(path)
        made_in, entries = parse_entries(content, path)
        foreign = differences(made_in, environment_here() if environment is None else environment)
        stale = tuple(one for one in entries if one.code != _code(one.operator, modules or {}))
        problems = [
            f"{path} was tuned elsewhere, so it is {'used with doubt' if allow_stale else 'not used'}: {one}"
            for one in foreign
        ]
        for operator, count in sorted(Counter(one.operator for one in stale).items()):
            if _code(operator, modules or {}) is None:
                problems.append(
                    f"{path}: there is no operator {operator!r} here; {count} of its entries mean nothing"
                )
                continue
            problems.append(
                f"{path}: {operator} has other code now than when it was tuned; {count} of its entries "
                f"{'are used with doubt' if allow_stale else 'are not used'}: drivetrain ops tune CONFIG "
                f"--operator {operator}"
            )
        choices: dict[str, dict[int, str]] = {}
        if allow_stale or not foreign:
            for one in entries:
                if allow_stale or one not in stale:
                    choices.setdefault(one.call, {})[one.tokens] = one.backend
        digest = hashlib.sha256(content).hexdigest()
        return cls(path, digest, made_in, entries, foreign, stale, tuple(problems), Counter(), choices)

    def backend_for(self, signature: Signature) -> str | None:
        """The backend that was found best for a call; None where nothing that is in the file speaks of it.

        A call with as many tokens as one that was measured has its choice; another has that of the nearest number in
        the same bucket of powers of two.
        """
        key = key_of(signature)
        return self._nearest(key.call, key.tokens, key.bucket)

    def choice(self, call: str, tokens: int) -> str | None:
        """What was found best for a call of that text with exactly so many tokens; None where nothing was."""
        return self._nearest(call, tokens, (tokens, tokens))

    def _nearest(self, call: str, tokens: int, bucket: tuple[int, int]) -> str | None:
        measured = self._choices.get(call, {})
        if tokens in measured:
            return measured[tokens]
        least, largest = bucket
        near = [number for number in measured if least <= number <= largest]
        if not near:
            self.misses[f"{call}; {tokens} tokens"] += 1
            return None
        return measured[min(near, key=lambda number: (abs(number - tokens), number))]


def _code(operator: str, modules: Mapping[str, str]) -> str | None:
    """None where there is no such operator."""
    if operator in modules:
        return operator_code(modules[operator])
    module = module_of(operator)
    # To look for a module behind a dot would import what is before it.
    if not operator.isidentifier() or importlib.util.find_spec(module) is None:
        return None
    return operator_code(module)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise EnvironmentFault(
            f"there is no tuned file {path}; make one with: drivetrain ops tune CONFIG --output {path}"
        ) from None
    except OSError as error:
        raise EnvironmentFault(f"the tuned file {path} cannot be read: {error.strerror}") from error


def parse_entries(content: bytes, path: Path) -> tuple[dict[str, str], tuple[Entry, ...]]:
    """Environment and entries of a file's bytes.

    Raises:
        DrivetrainError: they are no tuned file, or one of a newer version.
    """
    try:
        text = content.decode("utf-8")
        document = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DrivetrainError(f"the tuned file {path} is damaged: {error}; {_AGAIN}") from error
    schema = document.pop("schema", None)
    if type(schema) is not int:
        raise DrivetrainError(f"{path} is no tuned file: line 1 should be schema = {SCHEMA}; {_AGAIN}")
    if schema > SCHEMA:
        raise DrivetrainError(
            f"the tuned file {path} was written by a newer Drivetrain (schema {schema}; this one reads {SCHEMA}); "
            f"update Drivetrain, or {_AGAIN}"
        )
    environment, listed = document.pop("environment", None), document.pop("entry", [])
    if document:
        name = next(iter(document))
        raise _damaged(path, text, name, f"{name} is no part of it")
    if not isinstance(environment, dict) or not all(isinstance(one, str) for one in environment.values()):
        raise _damaged(path, text, "[environment]", "environment is to be a table of texts")
    if not isinstance(listed, list):
        raise _damaged(path, text, "entry", "entry is to be a list of tables")
    entries = [_entry(path, text, number, one) for number, one in enumerate(listed)]
    seen: set[tuple[str, int]] = set()
    for number, one in enumerate(entries):
        if one.name in seen:
            line = _line_of(text, _ENTRY_HEADER, number)
            raise DrivetrainError(
                f"the tuned file {path} is damaged (line {line}: a second entry of one call); {_AGAIN}"
            )
        seen.add(one.name)
    return environment, tuple(entries)


def _entry(path: Path, text: str, number: int, given: Any) -> Entry:
    try:
        return Entry.model_validate_json(orjson.dumps(given))
    except (ValidationError, TypeError) as error:
        line = _line_of(text, _ENTRY_HEADER, number)
        where, why = "", str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            where, why = f"{_location(first['loc'])}: ", first["msg"]
        raise DrivetrainError(
            f"the tuned file {path} is damaged (entry at line {line}: {where}{why}); {_AGAIN}"
        ) from error


def _location(parts: Sequence[int | str]) -> str:
    return ".".join(map(str, parts)) or "entry"


def _damaged(path: Path, text: str, start: str, why: str) -> DrivetrainError:
    return DrivetrainError(
        f"the tuned file {path} is damaged (line {_line_of(text, start, 0)}: {why}); {_AGAIN}"
    )


def _line_of(text: str, start: str, number: int) -> int:
    """The line that is the ``number``-th, from 0, to begin so; 1 where there is none."""
    found = [line for line, one in enumerate(text.split("\n"), start=1) if one.strip().startswith(start)]
    return found[number] if number < len(found) else 1
