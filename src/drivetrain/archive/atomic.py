"""Replace a file whole: a reader, and a crash at any moment, sees the old content or the new one.

A temporary name in the same folder, fsync, rename, fsync of the folder. Without room on the disk the old
file stays as it was and the temporary one is removed.
"""

import contextlib
import errno
import os
import secrets
from pathlib import Path
from typing import Any

from drivetrain.archive.encoding import dumps
from drivetrain.errors import EnvironmentFault

__all__ = ["sync_folder", "write_bytes", "write_fault", "write_json", "write_text"]

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_fault(path: Path, error: OSError, consequence: str) -> EnvironmentFault:
    """The error for a file that could not be written: what, where, what it means, what to do."""
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        advice = "free some space on that file system, or write to another one"
    elif path.parent.exists() and not path.parent.is_dir():
        advice = f"{path.parent} is a file, a folder is needed"
    elif not path.parent.is_dir():
        advice = f"the folder {path.parent} does not exist"
    else:
        advice = "check the permissions of the folder and the file system"
    return EnvironmentFault(f"cannot write {path}: {reason}; {consequence}; {advice}")


def sync_folder(folder: Path) -> None:
    """Make a rename, or a new name, in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems have no fsync for folders; the rename has to do there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _replace(path: Path, temporary: Path, data: bytes | memoryview, fsync: bool) -> None:
    # 0o666 less the umask, as open() does; tempfile's 0o600 would hide the file from colleagues.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if fsync:
        sync_folder(path.parent)


def write_bytes(path: Path | str, data: bytes | memoryview, fsync: bool = True) -> None:
    """Put ``data`` at ``path`` in one step.

    Args:
        path: the file; its folder must exist.
        data: the whole content.
        fsync: off for files that are worthless after a crash (the heartbeat).

    Raises:
        EnvironmentFault: it could not be written (no room, no permission, no folder). What was at ``path``
            is untouched and no temporary file is left.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        _replace(target, temporary, data, fsync)
    except OSError as error:
        consequence = "the previous file is unchanged" if target.exists() else "nothing was written"
        raise write_fault(target, error, consequence) from error


def write_text(path: Path | str, text: str, fsync: bool = True) -> None:
    """:func:`write_bytes` of UTF-8 text."""
    write_bytes(path, text.encode(), fsync)


def write_json(path: Path | str, value: Any, fsync: bool = True) -> None:
    """:func:`write_bytes` of an indented JSON document; see :mod:`drivetrain.archive.encoding` for NaN."""
    write_bytes(path, dumps(value, indent=True) + b"\n", fsync)
