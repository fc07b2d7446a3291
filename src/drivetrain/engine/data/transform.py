"""``data.transform`` and ``data.batch_transform``: a user's callables, applied to documents or micro-batches."""

import hashlib
import importlib
import inspect
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.config.blend import transform_paths
from drivetrain.engine.data.reader import TokenReader
from drivetrain.engine.data.timing import OperationTimes
from drivetrain.errors import DataError

__all__ = ["TransformChain", "TransformedDocuments", "resolve_transform", "source_hash"]

CACHE_BYTES = 1 << 26

Transform = Callable[[NDArray[np.int64]], NDArray[np.int64]]


def resolve_transform(path: str, field: str = "data.transform") -> Transform:
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
            f"{field} = {path!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        raise DataError(f"{field} = {path!r}: module {module_name!r} has no {name!r}")
    if not callable(found):
        raise DataError(f"{field} = {path!r}: {name!r} is {type(found).__name__}, not callable")
    transform: Transform = found
    return transform


def source_hash(text: str, field: str = "data.transform") -> str:
    """Hex SHA-256 of the paths in ``text`` and the source files their callables are defined in.

    What those files import is not looked at. A callable without a source file (one of an extension module) counts by
    its path alone.
    """
    digest = hashlib.sha256(text.encode())
    for path in transform_paths(text):
        function = inspect.unwrap(resolve_transform(path, field))
        try:
            file = inspect.getsourcefile(function if inspect.isroutine(function) else type(function))
        except TypeError:  # built in
            file = None
        if file is not None and Path(file).is_file():
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()


class TransformChain:
    """The callables of one field, one after the other, each held to its contract and timed under its path.

    Picklable: a worker process resolves the callables itself.

    Args:
        text: the field's value, paths separated by commas.
        vocab_size: every id they return is below it.
        field: ``data.transform`` or ``data.batch_transform``, for messages.
    """

    def __init__(self, text: str, vocab_size: int, field: str = "data.transform") -> None:
        self.text = text
        self.vocab_size = vocab_size
        self.field = field
        self._resolve()

    def _resolve(self) -> None:
        self._callables: Sequence[tuple[str, Transform]] = tuple(
            (path, resolve_transform(path, self.field)) for path in transform_paths(self.text)
        )

    def apply(
        self, ids: NDArray[np.int64], what: str, times: OperationTimes | None = None
    ) -> NDArray[np.int64]:
        """``ids`` (int64, any shape), transformed: the same shape, int64. They may be changed in place.

        Args:
            what: they are of, for messages: ``document 7``.
            times: is told how long each callable took.
        Raises:
            DataError: a callable raised, or returned another shape, another kind, or ids outside
                ``[0, vocab_size)``.
        """
        for path, function in self._callables:
            before = time.perf_counter()
            ids = self._one(path, function, ids, what)
            if times is not None:
                times.add(path, time.perf_counter() - before)
        return ids

    def _one(
        self, path: str, function: Transform, original: NDArray[np.int64], what: str
    ) -> NDArray[np.int64]:
        where = f"{self.field} = {path!r}, {what}"
        shape = original.shape
        try:
            ids: Any = function(original)
        # The user's code may raise anything.
        except (Exception, SystemExit) as error:
            raise DataError(f"{where}: it raised {type(error).__name__}: {error}") from error
        if not isinstance(ids, np.ndarray):
            raise DataError(
                f"{where}: it returned {type(ids).__name__}, expected an int64 array of shape {shape}"
            )
        if ids.shape != shape:
            raise DataError(f"{where}: it returned shape {ids.shape}, expected {shape}")
        if ids.dtype.kind not in "iu":
            raise DataError(f"{where}: it returned {ids.dtype}, expected int64")
        outside = (ids < 0) | (ids >= self.vocab_size)
        if outside.any():
            at = int(np.argmax(outside))
            raise DataError(
                f"{where}: it returned id {int(ids.flat[at])} at position {at}, "
                f"outside model.vocab_size = {self.vocab_size}"
            )
        return ids.astype(np.int64, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"text": self.text, "vocab_size": self.vocab_size, "field": self.field}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._resolve()


class TransformedDocuments:
    """Documents of a corpus after ``data.transform``; the last few are kept, up to 64 MiB.

    Picklable: a worker process resolves the callables itself.
    """

    def __init__(
        self, reader: TokenReader, text: str, vocab_size: int, times: OperationTimes | None = None
    ) -> None:
        self.reader = reader
        self.chain = TransformChain(text, vocab_size)
        self.times = times
        self._forget()

    def _forget(self) -> None:
        self._cache: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        self._cached_bytes = 0

    def document(self, index: int) -> NDArray[np.int64]:
        """(length,) int64 ids of document ``index``, transformed.

        Raises:
            DataError: as of :meth:`TransformChain.apply`.
        """
        if index in self._cache:
            self._cache.move_to_end(index)
            return self._cache[index]
        # A copy: a callable may work in place.
        original = self.reader.document(index).astype(np.int64)
        ids = self.chain.apply(original, f"document {index}", self.times)
        self._cache[index] = ids
        self._cached_bytes += ids.nbytes
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return ids

    def __getstate__(self) -> dict[str, Any]:
        return {"reader": self.reader, "chain": self.chain, "times": self.times}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
