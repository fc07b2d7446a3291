"""``data.transform``: a user's callable applied to each document's token ids when it is read."""

import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.engine.data.indexed import IndexedReader
from drivetrain.errors import DataError

__all__ = ["TransformedDocuments", "resolve_transform"]

CACHE_BYTES = 1 << 26

Transform = Callable[[NDArray[np.int64]], NDArray[np.int64]]


def resolve_transform(path: str) -> Transform:
    """The callable at ``package.module:function`` or ``package.module.function``.

    Modules in the current folder are found too, as they are when a script there is run.

    Raises:
        DataError: no such module, no such name in it, or not callable.
    """
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    # Importing runs the user's code, which may raise anything.
    except (Exception, SystemExit) as error:
        raise DataError(
            f"data.transform = {path!r}: module {module_name!r} cannot be imported "
            f"({type(error).__name__}: {error})"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        raise DataError(f"data.transform = {path!r}: module {module_name!r} has no {name!r}")
    if not callable(found):
        raise DataError(f"data.transform = {path!r}: {name!r} is {type(found).__name__}, not callable")
    transform: Transform = found
    return transform


class TransformedDocuments:
    """Documents of a corpus after the transform; the last few are kept, up to 64 MiB.

    Picklable: a worker process resolves the callable itself.
    """

    def __init__(self, reader: IndexedReader, path: str, vocab_size: int) -> None:
        self.reader = reader
        self.path = path
        self.vocab_size = vocab_size
        self._prepare()

    def _prepare(self) -> None:
        self._transform = resolve_transform(self.path)
        self._cache: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        self._cached_bytes = 0

    def document(self, index: int) -> NDArray[np.int64]:
        """(length,) int64 ids of document ``index``, transformed.

        Raises:
            DataError: the callable raised, or returned another shape, another kind, or ids outside
                ``[0, vocab_size)``.
        """
        if index in self._cache:
            self._cache.move_to_end(index)
            return self._cache[index]
        ids = self._apply(index)
        self._cache[index] = ids
        self._cached_bytes += ids.nbytes
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return ids

    def _apply(self, index: int) -> NDArray[np.int64]:
        where = f"data.transform = {self.path!r}, document {index}"
        # A copy: the callable may work in place.
        original = self.reader.document(index).astype(np.int64)
        length = len(original)
        try:
            ids: Any = self._transform(original)
        # The user's code may raise anything.
        except (Exception, SystemExit) as error:
            raise DataError(f"{where}: it raised {type(error).__name__}: {error}") from error
        if not isinstance(ids, np.ndarray):
            raise DataError(
                f"{where}: it returned {type(ids).__name__}, expected an int64 array of shape ({length},)"
            )
        if ids.shape != (length,):
            raise DataError(f"{where}: it returned shape {ids.shape}, expected ({length},)")
        if ids.dtype.kind not in "iu":
            raise DataError(f"{where}: it returned {ids.dtype}, expected int64")
        outside = (ids < 0) | (ids >= self.vocab_size)
        if outside.any():
            at = int(np.argmax(outside))
            raise DataError(
                f"{where}: it returned id {int(ids[at])} at position {at}, "
                f"outside model.vocab_size = {self.vocab_size}"
            )
        return ids.astype(np.int64, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"reader": self.reader, "path": self.path, "vocab_size": self.vocab_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()
