"""A launcher: the user's own command that starts a run's processes where they belong, and how they ended there.

A template such as ``drivetrain lab run -- {command}`` is split into words once, when it is read, and run without a
shell. Launchers differ in what they make of an exit code and of what their processes say, so neither is
believed: each process writes both down itself (:mod:`drivetrain.tune.launched`), in a folder that all of them see.
"""

import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from drivetrain.config import nearest
from drivetrain.errors import DrivetrainError, EnvironmentFault
from drivetrain.tune.launched import STOP, began_file, ended_file, log_file, output_file

__all__ = ["HowItEnded", "LaunchedRanks", "Launcher"]

_WORDS, _LINE, _SIZE = "command", "command_line", "world_size"
_PLACEHOLDERS = (_WORDS, _LINE, _SIZE)
_BRACES = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|[{}]")
_LAST_WORDS = 2000


@dataclass(frozen=True)
class Launcher:
    """A template of a command that starts processes.

    Attributes:
        template: as it was given.
        words: of it, with placeholders.
    """

    template: str
    words: tuple[str, ...]

    @classmethod
    def parse(cls, template: str) -> "Launcher":
        """The launcher of a template.

        ``{command}``, a word of its own, stands for the words of the command that each process is to run;
        ``{command_line}``, anywhere in a word, for the same quoted for a POSIX shell, which ssh and ``bash -c`` want;
        ``{world_size}`` for the number of processes. ``{{`` and ``}}`` are braces.

        Raises:
            DrivetrainError: it is no such template.
        """

        def refuse(why: str) -> DrivetrainError:
            return DrivetrainError(
                f"--launcher {template!r}: {why}; for example: drivetrain lab run -- {{command}}"
            )

        try:
            words = tuple(shlex.split(template))
        except ValueError as error:
            raise refuse(f"it cannot be split into words as a shell would: {str(error).lower()}") from error
        if "\0" in template:
            raise refuse("it holds a null character, which no command can")
        found: list[str] = []
        for word in words:
            for match in _BRACES.finditer(word):
                name = match["name"]
                if match[0] in ("{{", "}}"):
                    continue
                if name not in _PLACEHOLDERS:
                    raise refuse(_unknown(match[0], name))
                if name == _WORDS and word != match[0]:
                    raise refuse(
                        f"{{{_WORDS}}} stands for several words and must be a word of its own; inside {word!r} write "
                        f"{{{_LINE}}}, which is quoted for a shell"
                    )
                found.append(name)
        commands = found.count(_WORDS) + found.count(_LINE)
        if commands != 1:
            what = (
                "has no place for the command" if commands == 0 else f"has {commands} places for the command"
            )
            raise refuse(f"it {what}: write {{{_WORDS}}} or {{{_LINE}}} once")
        if words[0] == f"{{{_WORDS}}}":
            raise refuse("it begins with the command: a launcher is a program that starts it")
        return cls(template, words)

    def require_program(self) -> None:
        """Raise EnvironmentFault where the program that it begins with is not there."""
        program = self.words[0]
        if shutil.which(program) is None:
            raise EnvironmentFault(
                f"--launcher {self.template!r}: there is no program {program!r} on this machine that may be run; "
                "write it with its path, or put its folder on PATH"
            )

    def command(self, command: Sequence[str], world_size: int) -> list[str]:
        """The words to run for ``world_size`` processes of ``command``."""
        values = {_LINE: shlex.join(command), _SIZE: str(world_size)}

        def value(match: re.Match[str]) -> str:
            return {"{{": "{", "}}": "}"}.get(match[0]) or values[match["name"]]

        whole = f"{{{_WORDS}}}"
        return [
            one for word in self.words for one in (command if word == whole else [_BRACES.sub(value, word)])
        ]


def _unknown(text: str, name: str | None) -> str:
    if name is None:
        return f"a lone {text!r}; for a brace write it twice"
    close = nearest(name, _PLACEHOLDERS)
    known = ", ".join(f"{{{one}}}" for one in _PLACEHOLDERS)
    return (
        f"{text} is no placeholder; there are {known}"
        f"{f', did you mean {{{close}}}?' if close else ''}; for a brace write it twice"
    )


@dataclass(frozen=True)
class HowItEnded:
    """What the processes of an attempt wrote down.

    Attributes:
        code: exit code of the process that failed first, less the number of a signal; 0: all of them ended well.
        text: what it said.
        memory_kill: the kernel of its machine killed it for want of memory.
    """

    code: int
    text: str
    memory_kill: bool


class LaunchedRanks:
    """The processes of one attempt, seen through the files that they write.

    Args:
        folder: of those files; must be new.
        world_size: processes that are to begin.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder = folder.resolve()
        self.world_size = world_size
        self.folder.mkdir()

    @property
    def log(self) -> Path:
        """What rank 0, which speaks for all, says on stderr."""
        return log_file(self.folder, 0)

    @property
    def output(self) -> Path:
        """What it says on stdout."""
        return output_file(self.folder)

    def command(self, command: Sequence[str], directory: Path) -> list[str]:
        """What the launcher is to start ``world_size`` times, for each to run ``command`` in ``directory``."""
        inside = [sys.executable, "-m", "drivetrain.tune.launched", str(self.folder), str(self.world_size)]
        return [*inside, str(directory), "--", *command]

    def ask_to_stop(self) -> None:
        """Have all processes end themselves, also where a signal to the launcher does not reach them."""
        (self.folder / STOP).touch()

    def ended(self, launcher_code: int, launcher_said: Callable[[], str]) -> HowItEnded:
        """How the attempt ended, once the launcher has.

        Args:
            launcher_code: its exit code, less the number of a signal.
            launcher_said: gives what it said itself.

        Raises:
            EnvironmentFault: the launcher did not start the processes that it was to start: no fault of what they were
                to run.
        """
        ends = {
            rank: found
            for rank in range(self.world_size)
            if (found := _read(ended_file(self.folder, rank))) is not None
        }
        faults = sorted({str(end["fault"]) for end in ends.values() if end["fault"] is not None})
        if faults:
            raise self._fault("; ".join(faults), launcher_code, launcher_said)
        failed = {rank: end for rank, end in ends.items() if end["exit_code"] != 0}
        if failed:
            first = min(failed, key=lambda rank: (failed[rank]["time"], rank))
            code = int(failed[first]["exit_code"])
            # Rank 0 tells of the end of all of them; where it has the same end, it has the words for it.
            speaker = 0 if failed.get(0, {}).get("exit_code") == code else first
            return HowItEnded(code, self._said(speaker), bool(failed[first]["memory_kill"]))
        self.require_begun(launcher_code, launcher_said)
        if len(ends) < self.world_size:
            lost = [rank for rank in range(self.world_size) if rank not in ends]
            hosts = ", ".join(
                f"rank {rank} on {(_read(began_file(self.folder, rank)) or {}).get('host', 'an unknown host')}"
                for rank in lost
            )
            return HowItEnded(
                1, f"error: the launcher ended ({_code(launcher_code)}) before {hosts} did", False
            )
        return HowItEnded(0, self._said(0), False)

    def require_begun(self, launcher_code: int, launcher_said: Callable[[], str]) -> None:
        """Raise EnvironmentFault where not all processes have begun; see :meth:`ended`."""
        began = sum(began_file(self.folder, rank).exists() for rank in range(self.world_size))
        if began < self.world_size:
            why = f"it started {began} of {self.world_size} processes of the run"
            raise self._fault(why, launcher_code, launcher_said)

    def _said(self, rank: int) -> str:
        try:
            return log_file(self.folder, rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def _fault(self, why: str, code: int, said: Callable[[], str]) -> EnvironmentFault:
        lines = [line.rstrip() for line in said().splitlines() if line.strip()]
        words = "\n".join(lines[-5:])[-_LAST_WORDS:] or "it said nothing"
        return EnvironmentFault(
            f"the launcher did not do its part ({_code(code)}): {why}; its last words: {words} ({self.folder}.log)"
        )


def _code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    # Real-time signals have no names of their own.
    names = {one.value: one.name for one in signal.Signals}
    return f"ended by {names.get(-code, f'signal {-code}')}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return found
