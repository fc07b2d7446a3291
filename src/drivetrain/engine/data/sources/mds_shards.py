"""Files of MosaicML's streaming (MDS): the index of a folder, and the samples of a shard.

Read by the format that the library documents and not through it: it asks for NumPy below 2.2, transformers below 5
and the clients of five clouds. A shard is little-endian: uint32 samples, uint32 (samples + 1) offsets, JSON that names
the columns, samples. A sample is the uint32 sizes of its columns of variable size, then the values of all. Nothing is
unpickled: a column of encoding ``pkl`` is refused.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from drivetrain.engine.data.sources.compression import open_bytes
from drivetrain.errors import DataError

__all__ = ["INDEX", "MdsShard", "ShardFile", "integer_array", "mds_index", "open_shard"]

INDEX = "index.json"
VERSION = 2
MOST_BYTES = 1 << 32
"""Offsets are uint32: no shard is larger."""
DIGESTS = frozenset(one for one in hashlib.algorithms_guaranteed if not one.startswith("shake"))
PICKLED = "pkl"
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_DTYPE_CODES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    32: "uint32",
    33: "int32",
    64: "uint64",
    65: "int64",
}
"""How a value of ``ndarray`` without dtype names its own; other codes are of floating point."""


@dataclass(frozen=True)
class ShardFile:
    """A file of a folder of MDS, as its index names it.

    Attributes:
        path: of the file that is there, compressed or not.
        checksum: algorithm and hexadecimal digest of that file; None: none that Python knows.
    """

    path: Path
    checksum: tuple[str, str] | None


def mds_index(folder: Path) -> list[ShardFile] | None:
    """The shards of a folder of MDS in their order; None for another folder.

    Raises:
        DataError: a damaged index, another format or version, pickled columns, shards that are missing or of another
            size.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        index = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    shards = index.get("shards") if isinstance(index, dict) else None
    if not isinstance(shards, list) or not all(isinstance(one, dict) and "format" in one for one in shards):
        # A text of that name.
        return None
    if not shards:
        if index.get("version") != VERSION:
            return None
        raise DataError(f"{path} names no shards: there is nothing in this folder of MDS")
    return [_shard_file(folder, path, number, one) for number, one in enumerate(shards)]


def _shard_file(folder: Path, index: Path, number: int, shard: dict[str, Any]) -> ShardFile:
    where = f"{index}, shard {number}"
    if shard["format"] != "mds":
        raise DataError(
            f"{where} is of format {shard['format']!r}; of MosaicML's formats mds alone is readable"
        )
    if shard.get("version") != VERSION:
        raise DataError(f"{where} is of version {shard.get('version')!r}; version {VERSION} is readable")
    names, encodings = shard.get("column_names"), shard.get("column_encodings")
    if isinstance(names, list) and isinstance(encodings, list):
        _refuse_pickles(where, list(zip(names, encodings, strict=False)))
    known = [one for one in (shard.get("raw_data"), shard.get("zip_data")) if isinstance(one, dict)]
    for file in known:
        name, size = file.get("basename"), file.get("bytes")
        if not isinstance(name, str) or not isinstance(size, int) or isinstance(size, bool):
            raise DataError(f"{where} is damaged: a file has no basename, or no number of bytes")
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or not inside.parts:
            raise DataError(f"{where} names a file outside of its folder: {name!r}")
        path = folder / inside
        try:
            if not path.is_file():
                continue
            found = path.stat().st_size
        except OSError as error:  # too long a name, a loop of links
            raise DataError(f"{where}: {name[:80]!r} cannot be looked up: {error.strerror}") from error
        if found != size:
            state = "truncated" if found < size else "longer than its index says"
            raise DataError(f"{path} is {state}: expected {size:,} bytes, found {found:,}")
        hashes = file.get("hashes")
        checksums = hashes.items() if isinstance(hashes, dict) else ()
        usable = [(algorithm, str(value)) for algorithm, value in checksums if algorithm in DIGESTS]
        return ShardFile(path, usable[0] if usable else None)
    raise DataError(
        f"{where}: {' and '.join(str(one.get('basename')) for one in known) or 'its file'} is not there"
    )


def _refuse_pickles(where: object, columns: Sequence[tuple[object, object]]) -> None:
    pickled = [name for name, encoding in columns if encoding == PICKLED]
    if pickled:
        raise DataError(
            f"{where}: column {pickled[0]!r} is pickled, and nothing is unpickled here: whoever wrote it could run "
            "anything; write the data set again without it"
        )


@dataclass(frozen=True)
class MdsShard:
    """The samples of one shard.

    Attributes:
        path: of its file.
        columns: encoding by name, in the order of the values.
        num_samples: how many there are.
    """

    path: Path
    columns: dict[str, str]
    num_samples: int
    _sizes: tuple[int | None, ...]
    _offsets: NDArray[np.uint32]
    _data: memoryview

    def values(self, column: str, start: int = 0) -> Iterator[bytes]:
        """The bytes of ``column``, which is one of :attr:`columns`, in each sample from ``start`` on.

        Raises:
            DataError: the sizes in a sample do not add up.
        """
        at = list(self.columns).index(column)
        fixed = np.array([size or 0 for size in self._sizes], dtype=np.int64)
        variable = np.flatnonzero([size is None for size in self._sizes])
        for number in range(start, self.num_samples):
            begin, end = int(self._offsets[number]), int(self._offsets[number + 1])
            sizes = fixed.copy()
            head = 4 * len(variable)
            if head <= end - begin:
                sizes[variable] = np.frombuffer(self._data, "<u4", len(variable), begin)
            if head + int(sizes.sum()) != end - begin:
                raise DataError(f"{self.path} is damaged: the columns of sample {number} do not fill it")
            first = begin + head + int(sizes[:at].sum())
            yield bytes(self._data[first : first + int(sizes[at])])


def open_shard(path: Path, checksum: tuple[str, str] | None = None) -> MdsShard:
    """The shard in a file, decompressed if it is.

    Args:
        checksum: as of :class:`ShardFile`.
    Raises:
        DataError: it is damaged, is not what ``checksum`` says, or holds pickles.
        EnvironmentFault: zstandard without pyarrow.
    """
    if checksum is not None:
        algorithm, expected = checksum
        with path.open("rb") as file:
            found = hashlib.file_digest(file, algorithm).hexdigest()
        if found != expected:
            raise DataError(f"{path} is damaged: its {algorithm} is {found}, and its index says {expected}")
    pieces = []
    size = 0
    with open_bytes(path) as (stream, _):
        while piece := stream.read(1 << 22):
            pieces.append(piece)
            size += len(piece)
            if size > MOST_BYTES:
                raise DataError(f"{path} is no MDS shard: it holds more than {MOST_BYTES:,} bytes")
    data = memoryview(b"".join(pieces))
    damaged = f"{path} is damaged, or no MDS shard"
    if path.suffix in (".br", ".snappy", ".bz2"):
        raise DataError(
            f"{path} is compressed as {path.suffix[1:]}; gz and zstd are readable, and no compression"
        )
    count = int.from_bytes(data[:4], "little")
    head = 4 * (count + 2)
    if len(data) < head:
        raise DataError(
            f"{damaged}: it says that it holds {count:,} samples, and ends before their offsets do"
        )
    offsets = np.frombuffer(data, "<u4", count + 1, 4)
    if (
        int(offsets[0]) < head
        or int(offsets[-1]) != len(data)
        or (np.diff(offsets.astype(np.int64)) < 0).any()
    ):
        raise DataError(
            f"{damaged}: the offsets of its samples are not those of a file of {len(data):,} bytes"
        )
    try:
        config = orjson.loads(data[head : int(offsets[0])])
        names, encodings, sizes = (config[f"column_{one}"] for one in ("names", "encodings", "sizes"))
        fitting = len(names) == len(encodings) == len(sizes) == len(set(names)) and all(
            isinstance(name, str)
            and isinstance(encoding, str)
            # A larger one is in no shard, and sums of such would not be those of integers.
            and (size is None or (type(size) is int and 0 <= size <= MOST_BYTES))
            for name, encoding, size in zip(names, encodings, sizes, strict=True)
        )
    except (ValueError, KeyError, TypeError):
        fitting = False
    if not fitting:
        raise DataError(f"{damaged}: its header does not name its columns")
    columns = dict(zip(names, encodings, strict=True))
    _refuse_pickles(path, list(columns.items()))
    # As the library has it: a column of size 0 is one of variable size.
    return MdsShard(path, columns, count, tuple(size or None for size in sizes), offsets, data)


def integer_array(encoding: str, data: bytes) -> NDArray[Any]:
    """The (n,) integers of a value of encoding ``ndarray``, ``ndarray:int32`` or ``ndarray:int32:1024``, flat.

    Raises:
        ValueError: another encoding, no integers, or a value that does not fill its shape.
    """
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    if kind != "ndarray" or (dtype and dtype not in INTEGERS):
        raise ValueError(f"its encoding is {encoding}, expected ndarray of integers, such as ndarray:int32")
    at = 0
    if not dtype:
        dtype = _DTYPE_CODES.get(data[0] if data else -1, "")
        if not dtype:
            raise ValueError("it holds a value that is no array of integers")
        at = 1
    if shape:
        count = int(np.prod([int(one) for one in shape.split(",")]))
    else:
        if len(data) <= at:
            raise ValueError("it holds a value that is cut off")
        axes, width = data[at] >> 2, 1 << (data[at] & 3)
        if len(data) < at + 1 + axes * width:
            raise ValueError("it holds a value that is cut off")
        count = int(np.prod(np.frombuffer(data, f"<u{width}", axes, at + 1).astype(np.int64)))
        at += 1 + axes * width
    values = (
        np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), -1, at)
        if len(data) > at
        else np.zeros(0, dtype)
    )
    if len(values) != count:
        raise ValueError(f"it holds a value of {len(values):,} numbers whose shape says {count:,}")
    return values
