"""One file of a store, brought here in parts; what has come is gone on from, whatever ended the transfer."""

import hashlib
import os
from pathlib import Path

import orjson

from drivetrain.archive.atomic import sync_folder, write_json
from drivetrain.engine.data.progress import Progress, ProgressCallback
from drivetrain.engine.data.remote.store import RemoteFile, Store
from drivetrain.errors import DataError

__all__ = ["PART_BYTES", "bring", "is_here"]

PART_BYTES = 1 << 24
"""So much is asked for at once, and lost where a transfer is ended."""
AT_ONCE = 1 << 22


def is_here(target: Path, notes: Path, file: RemoteFile | None = None) -> bool:
    """Whether ``target`` is all of what came once, and of this version of ``file``; arguments as of :func:`bring`."""
    facts = _facts(notes)
    if facts is None or not target.is_file() or target.stat().st_size != facts.get("size"):
        return False
    return file is None or facts.get("identity") == file.identity


def bring(
    store: Store,
    file: RemoteFile,
    target: Path,
    notes: Path,
    sha256: str | None,
    progress: ProgressCallback,
    *,
    part_bytes: int = PART_BYTES,
) -> None:
    """Put ``file`` at ``target``, which appears when all of it has come and is what was expected.

    Args:
        notes: path of what is noted of the transfer, to which ``.json``, ``.part`` and ``.begun`` are added; on the
            same file system.
        sha256: hexadecimal, of its content; None where nobody tells.
    Raises:
        DataError: its content is not what ``sha256`` says, or it has changed meanwhile.
        EnvironmentFault: the store does not answer. What has come is kept.
        OSError: no room on the disk. What has come is kept.
    """
    if is_here(target, notes, file) and (sha256 is None or (_facts(notes) or {}).get("sha256") == sha256):
        return
    part, begun = Path(f"{notes}.part"), Path(f"{notes}.begun")
    # Of another version of the file nothing can be used, nor where nobody tells versions apart.
    if not file.versioned or not begun.exists() or begun.read_text(encoding="utf-8") != file.identity:
        part.unlink(missing_ok=True)
        begun.write_text(file.identity, encoding="utf-8")
    before = store.file_now(file.path) if file.size > part_bytes else None
    phase = f"bringing {target.name}"
    with part.open("ab") as out:
        done = out.tell()
        if done > file.size:
            out.truncate(0)
            done = 0
        while done < file.size:
            progress(Progress(phase, done, file.size, "bytes"))
            out.write(store.read(file, done, min(done + part_bytes, file.size)))
            out.flush()
            os.fsync(out.fileno())
            done = min(done + part_bytes, file.size)
    progress(Progress(phase, file.size, file.size, "bytes"))
    # Its parts may be of two versions.
    if file.size > part_bytes and store.file_now(file.path) != before:
        part.unlink()
        raise DataError(
            f"{store.url}: {file.path} has changed while it was brought; it was thrown away: start again"
        )
    found = _sha256(part)
    if sha256 is not None and found != sha256:
        part.unlink()
        raise DataError(
            f"{store.url}: what came as {file.path} has SHA-256 {found}, and its list of checksums says {sha256}: it "
            "was damaged on its way, or is not the file that the list was made for; it was thrown away"
        )
    Path(f"{notes}.json").unlink(missing_ok=True)
    part.replace(target)
    # What is prepared from it is known by size and time of the last change: the same for the same version.
    changed = int(file.identity[:11], 16)
    os.utime(target, ns=(changed, changed))
    sync_folder(target.parent)
    write_json(Path(f"{notes}.json"), {"size": file.size, "identity": file.identity, "sha256": found})
    begun.unlink()


def _facts(notes: Path) -> dict[str, object] | None:
    try:
        value = orjson.loads(Path(f"{notes}.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(AT_ONCE):
            digest.update(data)
    return digest.hexdigest()
