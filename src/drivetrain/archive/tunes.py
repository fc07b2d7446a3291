"""Tunes on disk: ``tunes/<id>/tune.json``, the ladder with everything that was tried, kept or not.

``tune.json`` is replaced atomically after every finished piece, so that a tuner killed at any moment goes on from
there. The folder also holds ``configs/`` (one TOML a configuration), ``runs/`` (an archive of all its runs) and
``logs/``. Who works on a tune holds an exclusive lock on ``lock``.
"""

import contextlib
import dataclasses
import datetime
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from drivetrain.archive.atomic import sync_folder, write_fault, write_json
from drivetrain.archive.encoding import SCHEMA, read_document, restore_non_finite
from drivetrain.errors import RunError

__all__ = [
    "TUNE_FILE",
    "Tune",
    "create_tune",
    "find_tune",
    "hold_tune",
    "list_tunes",
    "open_tune",
    "save_tune",
]

TUNE_FILE = "tune.json"
_LOCK_FILE = "lock"
_STATUSES = ("running", "finished", "interrupted", "failed")


@dataclasses.dataclass(frozen=True)
class Tune:
    """One tune, as its document was at the moment it was opened.

    Attributes:
        path: the folder, wherever it is now.
        document: ``tune.json``, non-finite numbers as floats.
    """

    path: Path
    document: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The name the folder was made under."""
        return str(self.document["tune"])

    def status(self) -> str:
        """``finished``, ``interrupted`` or ``failed`` as stored; ``running`` while a process holds its lock, else
        ``lost``: it was killed, and can be resumed."""
        stored = str(self.document["status"])
        if stored != "running":
            return stored
        return "running" if _is_held(self.path) else "lost"


def open_tune(reference: Path | str, tunes_dir: Path | str = "tunes") -> Tune:
    """The tune that ``reference`` names: a folder, or the id (or its unique start or end) of one in ``tunes_dir``.

    Raises:
        RunError: there is none, several answer to it, or the file is damaged or of a newer version.
    """
    path = find_tune(reference, tunes_dir)
    if path is None:
        known = [tune.name for tune in list_tunes(tunes_dir)]
        there = f"the latest are: {', '.join(known[-5:])}" if known else "there are none"
        raise RunError(f"no tune {str(reference)!r} in {tunes_dir}; {there}")
    file = path / TUNE_FILE
    try:
        document = read_document(file)
    except FileNotFoundError:
        raise RunError(f"{path} is no tune: {TUNE_FILE} is missing") from None
    schema = document.get("schema")
    if not isinstance(schema, int) or schema < 1:
        raise RunError(f"{file} is damaged: it has no schema number (found {schema!r}, {SCHEMA} is expected)")
    if schema > SCHEMA:
        raise RunError(
            f"{file} has schema {schema}, this version of drivetrain reads up to {SCHEMA}; upgrade it"
        )
    for key, kind in (("tune", str), ("status", str), ("steps", list), ("settings", dict)):
        if not isinstance(document.get(key), kind):
            raise RunError(f"{file} is damaged: {key!r} is missing")
    if document["status"] not in _STATUSES:
        raise RunError(
            f"{file} is damaged: its status {document['status']!r} is none of {', '.join(_STATUSES)}"
        )
    return Tune(path, {key: restore_non_finite(value) for key, value in document.items()})


def find_tune(reference: Path | str, tunes_dir: Path | str = "tunes") -> Path | None:
    """Folder of the tune that ``reference`` names (see :func:`open_tune`); None where nothing answers to it.

    Raises:
        RunError: several answer to it.
    """
    word = str(reference)
    for candidate in (Path(word), Path(tunes_dir) / word):
        with contextlib.suppress(OSError, ValueError):  # too long a name, a null character
            if word and (candidate / TUNE_FILE).is_file():
                return candidate
    folders = list_tunes(tunes_dir)
    if word == "latest" and folders:
        return folders[-1]
    for matches in (str.startswith, str.endswith):
        found = [folder for folder in folders if word and matches(folder.name, word)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(folder.name for folder in found[-5:])
            raise RunError(f"{word!r} is ambiguous in {tunes_dir}, it means any of: {names}")
    return None


def list_tunes(tunes_dir: Path | str = "tunes") -> list[Path]:
    """Folders of the tunes in ``tunes_dir``, oldest first (an id begins with its date)."""
    return sorted(file.parent for file in Path(tunes_dir).glob(f"*/{TUNE_FILE}"))


def create_tune(tunes_dir: Path | str, name: str, make: Callable[[str, Path], Mapping[str, Any]]) -> Path:
    """Make ``<tunes_dir>/<date>-<time>-<name>-<4 hex>/`` with its document and ``configs/ runs/ logs/``.

    Args:
        make: id and folder → the first document. It may write into ``configs/``.

    Raises:
        EnvironmentFault: the folder cannot be made or filled; nothing is left of it.
    """
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "tune"
    stem = f"{datetime.datetime.now().astimezone():%Y%m%d-%H%M%S}-{word}"
    root = Path(tunes_dir)
    try:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            path = root / f"{stem}-{secrets.token_hex(2)}"
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
    except OSError as error:
        raise write_fault(root / stem, error, "no tune was started") from error
    try:
        for folder in ("configs", "runs", "logs"):
            (path / folder).mkdir()
        # Last: a folder is a tune from the moment it has a tune.json.
        save_tune(path, make(path.name, path))
        sync_folder(root)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def save_tune(path: Path, document: Mapping[str, Any]) -> None:
    """Replace the document of the tune at ``path``."""
    assert document["status"] in _STATUSES
    write_json(path / TUNE_FILE, {"schema": SCHEMA, **document})


@contextlib.contextmanager
def hold_tune(path: Path) -> Iterator[None]:
    """Be the only one who works on the tune at ``path``; the lock goes with the process, however it ends.

    Raises:
        RunError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # No locks on this system.
        yield
        return
    descriptor = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another process is working on {path}; two cannot continue one tune: wait for it"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _is_held(path: Path) -> bool:
    try:
        import fcntl

        descriptor = os.open(path / _LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
