"""Columns of a trace on disk, so that the second reading takes milliseconds.

A folder ``.drivetrain-cache`` beside the trace, or in the user's cache where that one cannot be written, holds one
folder for each content: ``<sha256>-<size>-<version>`` with a ``.npy`` file per column and ``trace.json``. It is
written under another name and renamed; each column's CRC-32 is in the JSON, so that a file torn by a crash is
noticed and read anew. Nothing is pickled.
"""

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from isal import isal_zlib
from numpy.typing import NDArray

from drivetrain.measure.machine import cache_folder
from drivetrain.trace.health import Finding

__all__ = [
    "READER_VERSION",
    "CachedTrace",
    "findings_from_json",
    "findings_to_json",
    "key_of",
    "load",
    "store",
]

READER_VERSION: Final = 2
"""Goes up with every change of what the reader makes of the same file."""

_SCHEMA: Final = 1
_FOLDER: Final = ".drivetrain-cache"
_DESCRIPTION: Final = "trace.json"

CachedTrace = tuple[dict[str, NDArray[Any]], dict[str, Any]]
"""Arrays by name, and a JSON document."""


def key_of(path: Path) -> str:
    """Name of a file's content: SHA-256, size and version of the reader."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
    return f"{digest[:40]}-{size}-v{READER_VERSION}"


def _folders(path: Path) -> Iterator[Path]:
    yield path.parent / _FOLDER
    yield cache_folder() / "traces"


def _writable(folder: Path) -> bool:
    """Whether a new file may be put in a folder. The superuser may everywhere, but is not asked to."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    return bool(mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)) and os.access(folder, os.W_OK)


def _crc(array: NDArray[Any]) -> int:
    return isal_zlib.crc32(array.view(np.uint8).data) if array.size else 0


def load(path: Path, key: str) -> CachedTrace | None:
    """What was stored for this content; None if nothing was, or it is damaged."""
    for folder in _folders(path):
        try:
            description = orjson.loads((folder / key / _DESCRIPTION).read_bytes())
            if description.get("schema") != _SCHEMA:
                continue
            arrays = {
                name: _array(folder / key / f"{name}.npy", crc)
                for name, crc in description["columns"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
            continue  # absent, or torn: read the trace itself
        return arrays, description["trace"]
    return None


def _array(path: Path, crc: int) -> NDArray[Any]:
    array: NDArray[Any] = np.load(path, allow_pickle=False)
    if _crc(array) != crc:
        raise ValueError(f"{path} is damaged")
    return array


def store(
    path: Path, key: str, arrays: Mapping[str, NDArray[Any]], document: Mapping[str, Any]
) -> Path | None:
    """Store arrays and a JSON document for this content.

    Returns:
        The folder; None where no cache can be written, which costs only time.
    """
    for folder in _folders(path):
        if folder.parent == path.parent and not _writable(path.parent):
            continue
        target = folder / key
        temporary = folder / f".{key[:16]}-{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            temporary.mkdir(parents=True)
            for name, array in arrays.items():
                np.save(temporary / f"{name}.npy", np.ascontiguousarray(array), allow_pickle=False)
            description = {
                "schema": _SCHEMA,
                "columns": {name: _crc(np.ascontiguousarray(array)) for name, array in arrays.items()},
                "trace": document,
            }
            (temporary / _DESCRIPTION).write_bytes(orjson.dumps(description))
            shutil.rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
        except OSError:
            # No permission or no room here; or another process stored the same a moment ago.
            shutil.rmtree(temporary, ignore_errors=True)
            if (target / _DESCRIPTION).exists():
                return target
            continue
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return target
    return None


def findings_to_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Findings as JSON."""
    return [asdict(finding) for finding in findings]


def findings_from_json(documents: list[dict[str, Any]]) -> tuple[Finding, ...]:
    """Findings from JSON."""
    return tuple(Finding(**{**document, "affects": tuple(document["affects"])}) for document in documents)
