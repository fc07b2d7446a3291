"""What is written down of a lab, so that whoever comes later can clean up after one that was killed.

A file a lab, written before the first namespace is made and removed after the last has gone. It names the process that
the lab belongs to; once that has died the lab is *stale*, and the next command removes it. A lab that is to stay
(``drivetrain lab up``) belongs to nobody as soon as it is complete.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.errors import DrivetrainError, EnvironmentFault
from drivetrain.lab.topology import Topology

__all__ = ["DEFAULT_FOLDER", "LabState", "Process", "locked", "name_of", "read_states"]

DEFAULT_FOLDER = Path("/run/drivetrain-lab")
"""Gone after a restart of the machine, as namespaces are."""

_SCHEMA = 1
_NAME = re.compile("[a-z][a-z0-9]{0,23}", re.ASCII)


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one with the same number.

    Attributes:
        id: its number.
        started: clock ticks from the start of the machine to its own.
    """

    id: int
    started: int

    @staticmethod
    def this() -> "Process":
        """The one that calls."""
        started = _start_of(os.getpid())
        assert started is not None, "/proc does not know this process"
        return Process(os.getpid(), started)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return _start_of(self.id) == self.started

    def to_document(self) -> dict[str, int]:
        """As JSON."""
        return {"id": self.id, "started": self.started}

    @staticmethod
    def from_document(document: Any) -> "Process | None":
        """From JSON of our own; None where there is none."""
        return None if document is None else Process(int(document["id"]), int(document["started"]))


@dataclass(frozen=True)
class LabState:
    """A lab as its file has it.

    Attributes:
        id: its name, and the middle of those of its namespaces.
        topology: its shape.
        owner: the process it belongs to; None: it stays until it is taken down.
        runner: the process that has a command running in it.
        is_complete: everything was made.
    """

    id: str
    topology: Topology
    owner: Process | None
    runner: Process | None = None
    is_complete: bool = False

    @property
    def is_stale(self) -> bool:
        """Nobody will ever use it or take it down: it was left behind."""
        return self.owner is not None and not self.owner.is_alive

    def write(self, folder: Path) -> None:
        """Put it in ``folder``, in one step.

        Raises:
            EnvironmentFault: the folder cannot be written to.
        """
        document = {
            "schema": _SCHEMA,
            "id": self.id,
            **self.topology.to_document(),
            "owner": None if self.owner is None else self.owner.to_document(),
            "runner": None if self.runner is None else self.runner.to_document(),
            "complete": self.is_complete,
        }
        path = _path(folder, self.id)
        temporary = folder / f".{self.id}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                json.dump(document, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise EnvironmentFault(
                f"cannot write {path}, which says what a lab consists of: {error.strerror or error}"
            ) from error

    def forget(self, folder: Path) -> None:
        """Remove its file."""
        _path(folder, self.id).unlink(missing_ok=True)


def name_of(name: str) -> str:
    """``name``, if a lab can be called so.

    Raises:
        DrivetrainError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise DrivetrainError(
            f"a lab cannot be called {name!r}; a name has up to 24 small letters and digits, a letter first"
        )
    return name


def read_states(folder: Path) -> list[LabState]:
    """All labs that ``folder`` knows of, by name.

    Raises:
        EnvironmentFault: a file there is not of our making.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            found.append(_state_of(document))
        except FileNotFoundError:
            continue  # somebody has taken that lab down just now
        except (ValueError, KeyError, TypeError) as error:
            raise EnvironmentFault(
                f"{path} does not describe a lab ({error}); look for its namespaces with `ip netns list`, remove them, "
                "then the file"
            ) from error
    return found


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """No other process makes, takes down or begins to use a lab of ``folder`` meanwhile.

    Raises:
        EnvironmentFault: the folder can be neither made nor written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w", encoding="utf-8")  # noqa: SIM115 - closed below, on every way out
    except OSError as error:
        raise EnvironmentFault(
            f"cannot use {folder} for what is known of labs: {error.strerror or error}"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _state_of(document: Any) -> LabState:
    if document["schema"] != _SCHEMA:
        raise ValueError(f"schema {document['schema']!r}, not {_SCHEMA}")
    return LabState(
        id=str(document["id"]),
        topology=Topology.from_document(document),
        owner=Process.from_document(document["owner"]),
        runner=Process.from_document(document["runner"]),
        is_complete=bool(document["complete"]),
    )


def _path(folder: Path, id: str) -> Path:
    return folder / f"{id}.json"


def _start_of(process: int) -> int | None:
    """Field 22 of /proc/<pid>/stat (proc(5)); None where there is no such process, or only its exit code is left."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
