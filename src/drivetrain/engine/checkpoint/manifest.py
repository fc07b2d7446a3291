"""``manifest.json``: size and SHA-256 of every other file of a checkpoint, written last.

A folder with a manifest that agrees with its files is a sound checkpoint; any other is damaged.
"""

import hashlib
import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from drivetrain.archive.atomic import sync_folder, write_json

__all__ = ["MANIFEST_FILE", "damage", "read_json", "seal"]

MANIFEST_FILE = "manifest.json"
SCHEMA = 1


def seal(path: Path, token: str) -> None:
    """Force every file and folder under ``path`` to the disk, then write the manifest.

    Args:
        token: names this attempt to save; kept in the manifest so that other ranks recognise it.
    """
    files = {}
    for file in sorted(path.rglob("*")):
        if file.is_file():
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                os.fsync(stream.fileno())
                size = stream.tell()
            files[file.relative_to(path).as_posix()] = {"size": size, "sha256": digest}
        elif file.is_dir():
            sync_folder(file)
    write_json(path / MANIFEST_FILE, {"schema": SCHEMA, "token": token, "files": files})


def damage(path: Path, *, contents: bool = True) -> str | None:
    """What is wrong with the checkpoint ``path``, in words; None if it is sound.

    Args:
        contents: compare the SHA-256 of every file; otherwise the sizes only.
    """
    try:
        manifest = read_json(path / MANIFEST_FILE)
        files = manifest["files"]
        if manifest["schema"] != SCHEMA:
            return f"{MANIFEST_FILE} has schema {manifest['schema']}, this version reads {SCHEMA}"
        if not files:
            return f"{MANIFEST_FILE} lists no files"
        for name, entry in files.items():
            problem = _file_damage(path, name, entry["size"], entry["sha256"] if contents else None)
            if problem is not None:
                return problem
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST_FILE} or a file it lists can't be read: {error}"
    except (KeyError, TypeError, AttributeError):
        return f"{MANIFEST_FILE} is not a manifest"
    return None


def _file_damage(path: Path, name: str, size: int, digest: str | None) -> str | None:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        return f"{MANIFEST_FILE} lists {name!r}, which is outside the checkpoint"
    file = path / name
    if not file.is_file():
        return f"{name} is missing"
    found = file.stat().st_size
    if found != size:
        return f"{name} has {found:,} bytes instead of {size:,}"
    if digest is not None:
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                return f"the content of {name} has changed (SHA-256)"
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file ``path``. Raises OSError, or ValueError if it holds no JSON object."""
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return value
