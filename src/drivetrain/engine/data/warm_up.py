"""Pages of a corpus that will be read soon: the system is told, and reads them while the step before computes."""

import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

from drivetrain.engine.data.reader import TokenReader

__all__ = ["PageCache"]

REMEMBERED_SHARE = 1 / 8
"""After advice about this share of the machine's memory all of it is forgotten: pages may have gone by then."""


class PageCache:
    """Advice to the system about the token file of a corpus. Does nothing where the system takes none.

    What lies in one or two pages that were named before is not named again: a call a document would cost more than
    reading it. Picklable: a worker process opens the file itself, and remembers for itself.

    Args:
        reader: of the corpus.
        remembered_bytes: about as much is remembered; by default :data:`REMEMBERED_SHARE` of the memory.
    """

    def __init__(self, reader: TokenReader, remembered_bytes: int | None = None) -> None:
        self._path = str(reader.files["bin"])
        self._item_bytes = reader.tokens.dtype.itemsize
        self._descriptor: int | None = None
        self._remembered_bytes = remembered_bytes
        self._named: NDArray[np.bool_] | None = None
        self._named_bytes = 0

    def will_need(self, first: NDArray[np.int64], count: NDArray[np.int64]) -> None:
        """``count`` (n,) tokens from each of ``first`` (n,) on, by their place in the file, will be read soon."""
        if not hasattr(os, "posix_fadvise"):
            return
        descriptor = self._open()
        if descriptor < 0:
            return
        starts, sizes = first * self._item_bytes, count * self._item_bytes
        new = self._not_named(starts, sizes)
        if not new.any():
            return
        for start, size in zip(starts[new].tolist(), sizes[new].tolist(), strict=True):
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_WILLNEED)

    def _open(self) -> int:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                # Advice is all this is: where the file is wanted, it is opened, and complained of, elsewhere.
                self._descriptor = -1
            else:
                weakref.finalize(self, os.close, self._descriptor)
                # A byte a page, of which the system provides those that are written to.
                pages = -(-os.fstat(self._descriptor).st_size // mmap.PAGESIZE)
                self._named = np.zeros(pages + 1, dtype=np.bool_)
                if self._remembered_bytes is None:
                    self._remembered_bytes = int(_memory_bytes() * REMEMBERED_SHARE)
        return self._descriptor

    def _not_named(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(n,) bool, which ranges of bytes are to be named; remembers them."""
        named = self._named
        assert named is not None
        assert self._remembered_bytes is not None
        first = starts // mmap.PAGESIZE
        last = (starts + (sizes - 1)) // mmap.PAGESIZE
        # Of a longer range the pages between were perhaps never named.
        new: NDArray[np.bool_] = ~(named[first] & named[last]) | (last > first + 1)
        # To the system no bytes are all that is left of the file.
        new &= sizes > 0
        self._named_bytes += int((last - first + 1)[new].sum()) * mmap.PAGESIZE
        if self._named_bytes > self._remembered_bytes:
            # A new array takes no memory until it is written to, as filling the old one would.
            self._named = named = np.zeros(len(named), dtype=np.bool_)
            self._named_bytes = 0
        named[first] = True
        named[last] = True
        return new

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_descriptor": None, "_named": None, "_named_bytes": 0}


def _memory_bytes() -> int:
    """Of this machine; 0 where it is not told, so that nothing is remembered."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0
