"""Finished rows on disk, so that what was expensive to build is built once.

One sparse file of equal slots, one slot a row, for the first rows that the bound leaves room for. A slot is the row's
tokens (int32), its document starts (bits) and a checksum of both. Processes of one machine write the same file without
knowing each other: they write the same bytes, and a slot that is half there, or was never written, fails its checksum
and is built again. What decides the content names the file, so that nothing stale is ever read.
"""

import fcntl
import os
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.archive.atomic import write_fault

__all__ = ["SampleCache", "make_room"]

CHECKSUM_BYTES = 8
SUFFIX = ".rows"
FORMAT = "1"
"""Part of the file's name: another layout of slots is another file."""


class SampleCache:
    """Rows of one split, by their number. Picklable: a worker process opens the file itself.

    Args:
        folder: where the file lies; made where it is not there.
        identity: of the rows: a hash of what they are a function of.
        row_length: tokens of a row.
        num_rows: rows there are.
        num_bytes: bound of the file.
    Attributes:
        num_slots: rows it takes: those with the lowest numbers.
        num_bytes: the file's size when all of them are there.
        fault: why it has stopped taking rows; None: it has not.
    Raises:
        EnvironmentFault: the folder or the file can't be made.
    """

    def __init__(
        self, folder: Path, identity: str, row_length: int, num_rows: int, *, num_bytes: int
    ) -> None:
        self.row_length = row_length
        self._token_bytes = 4 * row_length
        self._slot_bytes = self._token_bytes + -(-row_length // 8) + CHECKSUM_BYTES
        self.num_slots = min(num_rows, num_bytes // self._slot_bytes)
        self.num_bytes = self.num_slots * self._slot_bytes
        self.path = folder / f"{identity[:32]}-{FORMAT}{SUFFIX}"
        self.fault: str | None = None
        self._descriptor: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open()
            os.utime(self.path)
        except OSError as error:
            raise write_fault(self.path, error, "no sequences are kept") from error

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor

    def get(self, row: int, tokens: NDArray[np.int64], starts: NDArray[np.bool_]) -> bool:
        """Fill ``tokens`` and ``starts``, (row_length,) each, with a row; False where it is not there."""
        if row >= self.num_slots:
            return False
        slot = os.pread(self._open(), self._slot_bytes, row * self._slot_bytes)
        body, checksum = slot[:-CHECKSUM_BYTES], slot[-CHECKSUM_BYTES:]
        if len(slot) < self._slot_bytes or checksum != _checksum(row, body):
            return False
        tokens[:] = np.frombuffer(body, dtype="<i4", count=self.row_length)
        bits = np.frombuffer(body, dtype=np.uint8, offset=self._token_bytes)
        starts[:] = np.unpackbits(bits, count=self.row_length)
        return True

    def put(self, row: int, tokens: NDArray[np.int64], starts: NDArray[np.bool_]) -> None:
        """Keep a row, if there is a slot for it. A disk without room ends the keeping, and :attr:`fault` says so."""
        if row >= self.num_slots or self.fault is not None:
            return
        body = tokens.astype("<i4").tobytes() + np.packbits(starts).tobytes()
        slot = body + _checksum(row, body)
        try:
            written = os.pwrite(self._open(), slot, row * self._slot_bytes)
        except OSError as error:
            self.fault = str(write_fault(self.path, error, "the sample cache takes no more rows"))
        else:
            if written < len(slot):
                self.fault = f"{self.path}: only {written} of {len(slot)} bytes of a row could be written"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}


def _checksum(row: int, body: bytes) -> bytes:
    """Never zero, which is what a hole in the file reads as: the row's number is in it, plus one."""
    return zlib.crc32(body).to_bytes(4, "little") + ((row + 1) & 0xFFFFFFFF).to_bytes(4, "little")


def make_room(folder: Path, own: Sequence[SampleCache], num_bytes: int) -> None:
    """Remove caches in ``folder`` that are not ``own``, those used least recently first, until all fit ``num_bytes``.

    A process that still has one of them open goes on with it.

    Raises:
        EnvironmentFault: the folder can't be written.
    """
    left = num_bytes - sum(cache.num_bytes for cache in own)
    kept = {cache.path for cache in own}
    try:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            others = []
            for path in folder.glob(f"*{SUFFIX}"):
                if path not in kept:
                    status = path.stat()
                    others.append((status.st_mtime, status.st_blocks * 512, path))
            total = sum(size for _, size, _ in others)
            for _, size, path in sorted(others):
                if total <= left:
                    return
                path.unlink(missing_ok=True)
                total -= size
    except OSError as error:
        raise write_fault(folder, error, "no sequences are kept") from error
