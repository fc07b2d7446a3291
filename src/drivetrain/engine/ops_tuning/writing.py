"""Tuned entries as text: sorted, one field a line, readable and comparable by eye and by diff; several tuners may add
to one file at once."""

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from drivetrain.archive.atomic import write_fault, write_text
from drivetrain.engine.ops._tuned_environment import differences
from drivetrain.engine.ops.tuned_file import SCHEMA, Candidate, Entry, parse_entries
from drivetrain.errors import DrivetrainError, EnvironmentFault

__all__ = ["held_entries", "make_folder", "merge_tuned", "read_tuned", "to_text", "write_tuned"]

_HEAD = """\
# Made by `drivetrain ops tune`; docs/ops-tuning.md has the meaning of its fields. Runs read it, and check that it was
# made on such a machine with such libraries.
"""


def to_text(environment: Mapping[str, str], entries: Iterable[Entry]) -> str:
    """The file. Equal contents give equal text, whatever order they come in."""
    lines = [f"{_HEAD}schema = {SCHEMA}", "", "[environment]"]
    lines += [f"{_key(name)} = {_text(value)}" for name, value in sorted(environment.items())]
    for one in sorted(entries, key=lambda entry: entry.name):
        lines += ["", "[[entry]]", *_fields(one, ("candidate",))]
        for candidate in one.candidate:
            lines += ["", "  [[entry.candidate]]", *(f"  {line}" for line in _fields(candidate, ()))]
    return "\n".join(lines) + "\n"


def make_folder(path: Path) -> None:
    """Make the folder of the file ``path`` if need be, and refuse what could not be written in the end.

    Raises:
        EnvironmentFault: the folder cannot be made or written to, or ``path`` is a folder itself.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot make the folder {path.parent}: {error.strerror}; name another file with --output"
        ) from error
    if path.is_dir():
        raise EnvironmentFault(f"{path} is a folder; name a file with --output")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise EnvironmentFault(
            f"the folder {path.parent} cannot be written to; name another file with --output"
        )


def write_tuned(path: Path, environment: Mapping[str, str], entries: Iterable[Entry]) -> None:
    """Put the file at ``path`` in one step; its folder is made if need be.

    Raises:
        EnvironmentFault: it cannot be written.
    """
    make_folder(path)
    write_text(path, to_text(environment, entries))


def read_tuned(path: Path) -> tuple[dict[str, str], tuple[Entry, ...]] | None:
    """Environment and entries of a file; None where there is none.

    Raises:
        DrivetrainError: it is damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return parse_entries(content, path)


def held_entries(path: Path, environment: Mapping[str, str]) -> dict[tuple[str, int], Entry]:
    """What a file holds that may stand beside measurements of ``environment``, by call and tokens.

    Raises:
        DrivetrainError: it is damaged, or was made in another environment.
    """
    read = read_tuned(path)
    if read is None:
        return {}
    made_in, entries = read
    foreign = differences(made_in, environment)
    if foreign:
        raise DrivetrainError(
            f"{path} was tuned in another environment ({'; '.join(foreign)}): what is measured here cannot stand "
            "beside it; --fresh replaces it, --output names another file"
        )
    return {one.name: one for one in entries}


def merge_tuned(
    path: Path,
    environment: Mapping[str, str],
    measured: Mapping[tuple[str, int], Entry],
    *,
    base: Mapping[tuple[str, int], Entry] | None,
    keep: Callable[[Entry], bool],
) -> dict[tuple[str, int], Entry]:
    """Add to the file what was measured, and return all that it holds then. Several tuners may do so at once.

    Args:
        measured: replaces what the file has of the same call.
        base: what the file is to hold beside that; None: what it holds now, which others may have written.
        keep: which of its entries stay.

    Raises:
        DrivetrainError: it is damaged, or was replaced by a file of another environment.
        EnvironmentFault: it cannot be locked or written.
    """
    make_folder(path)
    with _locked(path):
        others = held_entries(path, environment) if base is None else base
        merged = {**{name: one for name, one in others.items() if keep(one)}, **measured}
        write_text(path, to_text(environment, merged.values()))
    return merged


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time, and given up by the system where one is killed. A file of its own: the one that
    is written is another one each time."""
    beside = path.with_name(f".{path.name}.lock")
    try:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise write_fault(beside, error, "the tuned file is unchanged") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot lock {beside}: {error.strerror}; two tuners could overwrite each other's choices there: name "
                "a file on another file system with --output"
            ) from error
        yield
    finally:
        os.close(descriptor)


def _fields(one: Entry | Candidate, without: tuple[str, ...]) -> list[str]:
    found = []
    for name in type(one).model_fields:
        value = getattr(one, name)
        # TOML has no null: what is absent is left out, and reads back as absent.
        if name not in without and value is not None:
            found.append(f"{name} = {_value(value)}")
    return found


def _value(value: object) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    assert isinstance(value, (int, float))
    return repr(value)


def _text(value: str) -> str:
    """A basic string. TOML's escapes are those of JSON, and it asks for one more."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _text(name)
