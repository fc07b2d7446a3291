"""A profiler's trace as one compressed file that is whole or absent."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib
from torch.profiler import profile

from drivetrain.archive.atomic import sync_folder, write_fault

__all__ = ["export_trace", "remove_leftovers", "trace_bytes"]

_COMPRESSION = 2
_GZIP_WINDOW_BITS = 31
_CHUNK_BYTES = 1 << 20


def export_trace(profiler: profile, path: Path) -> None:
    """Write the stopped profiler's trace to ``path`` (``.json.gz``), replacing it in one step.

    Raises:
        EnvironmentFault: it could not be written; nothing new is left in the folder.
    """
    with _compressed(profiler, path) as temporary:
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        sync_folder(path.parent)


def trace_bytes(profiler: profile, folder: Path) -> int:
    """Bytes that :func:`export_trace` would write; ``folder`` holds the file for a moment.

    Raises:
        EnvironmentFault: there is no room for it.
    """
    with _compressed(profiler, folder / "trial.json.gz") as temporary:
        return temporary.stat().st_size


def remove_leftovers(folder: Path) -> None:
    """Remove what a process that was killed while it exported has left anywhere in ``folder``."""
    for leftover in folder.rglob(".*.tmp"):
        leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def _compressed(profiler: profile, path: Path) -> Iterator[Path]:
    """The compressed trace under a temporary name beside ``path``, removed at the end unless it was renamed."""
    token = f"{os.getpid()}-{secrets.token_hex(8)}"
    plain, temporary = path.with_name(f".{token}.plain.tmp"), path.with_name(f".{token}.packed.tmp")
    try:
        # Torch's own compression is ten times slower, and writes to the final name while it goes.
        profiler.export_chrome_trace(str(plain))
        with open(plain, "r+b") as source, open(temporary, "xb") as target:
            _name_it(source, path, token.encode())
            packer = isal_zlib.compressobj(_COMPRESSION, isal_zlib.DEFLATED, _GZIP_WINDOW_BITS)
            while chunk := source.read(_CHUNK_BYTES):
                target.write(packer.compress(chunk))
            target.write(packer.flush())
        plain.unlink()
        yield temporary
    except OSError as error:
        raise write_fault(path, error, "the trace is lost") from error
    finally:
        for leftover in (plain, temporary):
            with contextlib.suppress(FileNotFoundError):
                leftover.unlink()


def _name_it(source: BinaryIO, path: Path, token: bytes) -> None:
    """Replace the name that torch writes at the end, the whole path of the temporary file; back to the start.

    A trace without that end was cut short: torch does not tell when the disk is full.
    """
    size = source.seek(0, os.SEEK_END)
    start = source.seek(max(0, size - _CHUNK_BYTES))
    end = source.read()
    name = end.rfind(b'"traceName"')
    if name < 0 or token not in end[name:]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    source.seek(start + name)
    source.write(b'"traceName": "' + path.name.removesuffix(".gz").encode() + b'"\n}')
    source.truncate()
    source.seek(0)
