"""Parquet files, and folders that the ``datasets`` library saved, with a column of token ids.

Their pages are compressed and no place in them can be read alone, so the ids are copied once into an indexed corpus in
the cache folder, under the fingerprint of the files.
"""

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.archive.atomic import write_fault
from drivetrain.engine.data.fingerprint import combined_fingerprint, file_fingerprint
from drivetrain.engine.data.formats.detect import first_bytes
from drivetrain.engine.data.indexed import IndexedReader, IndexedWriter, index_path
from drivetrain.engine.data.progress import Progress, ProgressCallback
from drivetrain.engine.data.sources.discovery import saved_data_set
from drivetrain.engine.data.sources.mds_shards import integer_array, mds_index, open_shard
from drivetrain.engine.data.sources.tables import arrow_batches, require_arrow
from drivetrain.engine.data.standard_library import only_one
from drivetrain.errors import DataError
from drivetrain.measure.machine import cache_folder

__all__ = ["id_table_files", "open_id_table"]

COLUMN = "input_ids"
MDS_COLUMNS = (COLUMN, "tokens")
SAMPLES_AT_ONCE = 1024
Checksums = dict[Path, tuple[str, str] | None]
VERSION = "1"
"""Changes when the copy of the same files would be another."""


def id_table_files(path: Path) -> list[Path] | None:
    """The tables behind ``path``: a Parquet file, a folder of them, a saved data set, or the shards of a folder of MDS;
    None for anything else."""
    if path.is_file():
        return [path] if first_bytes(path, 4) == b"PAR1" else None
    if not path.is_dir():
        return None
    shards = mds_index(path)
    if shards:
        return [shard.path for shard in shards]
    return saved_data_set(path) or sorted(path.glob("*.parquet")) or None


def open_id_table(path: Path, files: list[Path], progress: ProgressCallback) -> IndexedReader:
    """The rows of ``files`` as documents: the copy in the cache folder, which is made where it is missing.

    Raises:
        DataError: damaged files, no column ``input_ids``, or one that holds no ids.
        EnvironmentFault: no pyarrow; no room for the copy.
    """
    key = combined_fingerprint(VERSION, *(file_fingerprint(file) for file in files))[:32]
    prefix = cache_folder() / "corpora" / f"ids-{key}" / "corpus"
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with only_one(prefix.parent / "lock", progress):
            if not index_path(prefix).exists():
                _copy(files, prefix, _checksums(path), progress)
    except OSError as error:
        raise write_fault(prefix, error, f"the ids of {path} were not copied") from error
    return IndexedReader(prefix)


def _checksums(path: Path) -> Checksums:
    """Of the shards of MDS; nothing of other files."""
    shards = mds_index(path) if path.is_dir() else None
    return {shard.path: shard.checksum for shard in shards or ()}


def _copy(files: list[Path], prefix: Path, checksums: Checksums, progress: ProgressCallback) -> None:
    for leftover in prefix.parent.glob("*.tmp-*"):
        leftover.unlink()
    needed = sum(file.stat().st_size for file in files)
    if shutil.disk_usage(prefix.parent).free < needed:
        progress(Progress(f"copying token ids to {prefix.parent}, where less than {needed:,} bytes are free"))
    # Ids of any vocabulary: how large it is, only the end of the copy would tell.
    with IndexedWriter(prefix, 2**31) as writer:
        for number, file in enumerate(files):
            rows = _mds_rows(file, checksums[file]) if file in checksums else _rows(file)
            for lengths, ids in rows:
                try:
                    writer.add_all(ids, lengths)
                except DataError as error:
                    raise DataError(f"{file}: {error}") from error
            progress(Progress("copying token ids", number + 1, len(files), "files"))
        writer.commit()


def _rows(path: Path) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(rows,) int64 numbers of ids of some rows, and the (sum,) int64 ids."""
    pyarrow = require_arrow(path, "token ids")
    try:
        for array in _columns(pyarrow, path):
            lengths = pyarrow.compute.list_value_length(array)
            if lengths.null_count or array.flatten().null_count:
                raise DataError(f"{path}: column {COLUMN!r} has rows or ids that are missing (null)")
            yield (
                lengths.to_numpy(zero_copy_only=False).astype(np.int64),
                array.flatten().to_numpy(zero_copy_only=False).astype(np.int64),
            )
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _mds_rows(
    path: Path, checksum: tuple[str, str] | None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """As :func:`_rows`, of a shard of MDS."""
    shard = open_shard(path, checksum)
    column = next((one for one in MDS_COLUMNS if one in shard.columns), None)
    if column is None:
        raise DataError(
            f"{path}: no column {' or '.join(map(repr, MDS_COLUMNS))}, so that it holds no token ids; its columns: "
            f"{', '.join(shard.columns)}; make a corpus of its text with `drivetrain data prepare`"
        )
    encoding = shard.columns[column]
    if encoding == "bytes":
        raise DataError(
            f"{path}: column {column!r} is bytes, which do not say how wide an id is; write it as ndarray:int32"
        )
    for start in range(0, shard.num_samples, SAMPLES_AT_ONCE):
        held = []
        for value in islice(shard.values(column, start), SAMPLES_AT_ONCE):
            try:
                held.append(integer_array(encoding, value).astype(np.int64))
            except ValueError as error:
                raise DataError(f"{path}: column {column!r}: {error}") from error
        yield np.array([len(one) for one in held], np.int64), np.concatenate(held)


def _columns(pyarrow: Any, path: Path) -> Iterator[Any]:
    if first_bytes(path, 4) != b"PAR1":
        for batch, _ in arrow_batches(pyarrow, path, COLUMN, _require_ids):
            yield batch.column(batch.schema.get_field_index(COLUMN))
        return
    with pyarrow.parquet.ParquetFile(path) as file:
        _require_ids(pyarrow, path, file.schema_arrow, COLUMN)
        for batch in file.iter_batches(columns=[COLUMN]):
            yield batch.column(0)


def _require_ids(pyarrow: Any, path: Path, schema: Any, column: str) -> None:
    if column not in schema.names:
        raise DataError(
            f"{path}: no column {column!r}, so that it holds no token ids; its columns: {', '.join(schema.names)}; "
            "make a corpus of its text with `drivetrain data prepare`"
        )
    kind, types = schema.field(column).type, pyarrow.types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not lists or not types.is_integer(kind.value_type):
        raise DataError(f"{path}: column {column!r} is {kind}, expected lists of whole numbers")
