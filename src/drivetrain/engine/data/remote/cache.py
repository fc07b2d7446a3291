"""A bounded folder of what URLs name. One process of a machine brings it, the others wait; what is in use stays.

``<folder>/<key>/`` holds the files of one URL, and ``<key>.lock`` is held by the process that brings them. Who reads
them holds ``<key>.use`` together with others; an entry is removed only by who gets that one alone.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from drivetrain.addresses import withheld
from drivetrain.config import DataConfig
from drivetrain.engine.data.progress import Progress, ProgressCallback
from drivetrain.errors import EnvironmentFault
from drivetrain.measure.machine import cache_folder

__all__ = ["Entry", "RemoteCache", "key_of", "remote_cache"]

WANTED = "wanted"
"""File of an entry: the bytes that were made room for."""


def remote_cache(folder: str | Path | None = None, num_bytes: int | None = None) -> "RemoteCache":
    """The cache in ``folder``, by default ``remote`` in the cache folder, of the default bound of a configuration."""
    most = DataConfig.model_fields["remote_cache_bytes"].default if num_bytes is None else num_bytes
    return RemoteCache(Path(folder) if folder is not None else cache_folder() / "remote", most)


def key_of(url: str) -> str:
    """Name of the entry of a URL, however it is signed: 16 hexadecimal digits."""
    return hashlib.sha256(withheld(url).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Entry:
    """The files of one URL.

    Attributes:
        folder: where they lie.
        descriptor: of the file that says that they are in use; closing it gives them up.
    """

    folder: Path
    descriptor: int


class RemoteCache:
    """The entries below a folder.

    Args:
        folder: made where it is not there.
        num_bytes: bound of all entries together.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        self.num_bytes = num_bytes

    def entry(self, url: str) -> Entry:
        """The entry of ``url``, which stays as it is until its descriptor is closed. It may be empty yet."""
        key = key_of(url)
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / f"{key}.use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            folder = self.folder / key
            folder.mkdir(exist_ok=True)
            # When it was used last.
            os.utime(folder)
        except BaseException:
            os.close(descriptor)
            raise
        return Entry(folder, descriptor)

    @contextmanager
    def only_one(self, entry: Entry, url: str, progress: ProgressCallback) -> Iterator[None]:
        """Be the only process that changes the entry; others wait."""
        with entry.folder.with_suffix(".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(Progress(f"waiting for another process that brings {url}"))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def make_room(self, entry: Entry, url: str, wanted: int) -> None:
        """Remove other entries, those used least recently first, until this one fits with ``wanted`` bytes.

        Raises:
            EnvironmentFault: it does not fit, or not beside what is in use.
        """
        if wanted > self.num_bytes:
            raise EnvironmentFault(
                f"{url} has {wanted:,} bytes, and the folder {self.folder} may hold {self.num_bytes:,}: raise "
                f"data.remote_cache_bytes (--cache-bytes) to at least {wanted:,}"
            )
        with (self.folder / "room.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            others = [path for path in self.folder.iterdir() if path.is_dir() and path != entry.folder]
            by_age = sorted((path.stat().st_mtime, path) for path in others)
            sizes = {path: _size(path) for path in others}
            total = wanted + sum(sizes.values())
            for _, path in by_age:
                if total <= self.num_bytes:
                    break
                if _removed(path):
                    total -= sizes[path]
            if total <= self.num_bytes:
                # Others who make room while this comes count all of it.
                (entry.folder / WANTED).write_text(str(wanted), encoding="ascii")
                return
        raise EnvironmentFault(
            f"{url} has {wanted:,} bytes, which do not fit into {self.folder} beside {total - wanted:,} bytes that "
            f"are in use: raise data.remote_cache_bytes (--cache-bytes; now {self.num_bytes:,}) to at least {total:,}"
        )


def _size(folder: Path) -> int:
    """Bytes of an entry: what is there, or what is to come."""
    total = wanted = 0
    with contextlib.suppress(FileNotFoundError, ValueError):
        wanted = int((folder / WANTED).read_text(encoding="ascii"))
    for path in folder.rglob("*"):
        # Another process may be at work in there.
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return max(total, wanted)


def _removed(folder: Path) -> bool:
    """Remove an entry, unless somebody uses it."""
    with folder.with_suffix(".use").open("w") as use:
        try:
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        shutil.rmtree(folder)
    return True
