"""Parquet and Arrow: one document a row, from one column of strings."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drivetrain.engine.data.sources.source import Block, Position, Reading, Report, Rows, Source
from drivetrain.errors import DataError, DrivetrainError, EnvironmentFault

__all__ = ["arrow_batches", "blocks", "require_arrow", "texts"]

ROWS_AT_ONCE = 1024
FILE_MAGIC = b"ARROW1"
CONTINUATION = b"\xff\xff\xff\xff"


def require_arrow(path: Path, what: str) -> Any:
    """The module ``pyarrow`` with what is used of it imported. Raises EnvironmentFault where it is missing."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentFault(
            f"{path}: reading {what} needs pyarrow, which is not installed; `pip install 'drivetrain[train]'`"
        ) from error
    return pyarrow


def blocks(source: Source, start: Position, reading: Reading) -> Iterator[Block]:
    """Rows of ``source`` from row ``start.offset`` on, about ``reading.block_bytes`` of text a block.

    Raises:
        DataError: a damaged file, no such column, or no column of strings.
        EnvironmentFault: no pyarrow.
    """
    parquet = source.kind == "parquet"
    rows = _parquet_rows if parquet else _arrow_rows
    row, read = start.offset, 0
    held: list[str | None] = []
    size = 0
    with _damage_named(source.path, "Parquet" if parquet else "Arrow"):
        for values, read in rows(source, start.offset, reading.json_key):
            held.extend(values)
            size += sum(len(value) for value in values if value is not None)
            row += len(values)
            if size >= reading.block_bytes:
                yield Block(Rows(tuple(held)), Position(start.source, row), read)
                held, size = [], 0
    if held:
        yield Block(Rows(tuple(held)), Position(start.source, row), read)


def texts(content: Rows, report: Report) -> Iterator[str]:
    """The text of each row; none at all is an empty document."""
    del report
    return (text or "" for text in content.texts)


def _parquet_rows(source: Source, skip: int, column: str) -> Iterator[tuple[list[str | None], int]]:
    """Values of the rows behind the first ``skip``, and the bytes that all rows so far stand for."""
    pyarrow = require_arrow(source.path, "Parquet")
    with pyarrow.parquet.ParquetFile(source.path) as file:
        _require_strings(pyarrow, source.path, file.schema_arrow, column)
        before = 0
        total = max(1, file.metadata.num_rows)
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if before + count <= skip:
                before += count
                continue
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[column]):
                values = batch.column(0).to_pylist()[max(0, skip - before) :]
                before += batch.num_rows
                if values:
                    yield values, source.size * before // total


def _arrow_rows(source: Source, skip: int, column: str) -> Iterator[tuple[list[str | None], int]]:
    pyarrow = require_arrow(source.path, "Arrow")
    before = 0
    for batch, read in arrow_batches(pyarrow, source.path, column, _require_strings):
        values = batch.column(batch.schema.get_field_index(column))[max(0, skip - before) :].to_pylist()
        before += batch.num_rows
        if values:
            yield values, read


def arrow_batches(pyarrow: Any, path: Path, column: str, require: Any) -> Iterator[tuple[Any, int]]:
    """Record batches of an Arrow file or stream, and the bytes read so far; the schema is checked by ``require``.

    The column is verified first: pyarrow reads where a damaged offset points, which may end the process.

    Raises:
        DataError: a stream without its end mark: it was cut off.
        ValueError: the column is damaged.
    """
    with path.open("rb") as file:
        magic = file.read(len(FILE_MAGIC))
        file.seek(max(0, path.stat().st_size - 8))
        tail = file.read(8)
    with pyarrow.memory_map(str(path)) as mapped:
        if magic == FILE_MAGIC:
            table = pyarrow.ipc.open_file(mapped)
            require(pyarrow, path, table.schema, column)
            for index in range(table.num_record_batches):
                yield (
                    _verified(table.get_batch(index), column),
                    path.stat().st_size * (index + 1) // table.num_record_batches,
                )
            return
        stream = pyarrow.ipc.open_stream(mapped)
        # Without this a stream that was cut between two batches would be taken for a short one.
        whole = tail == CONTINUATION + bytes(4) if magic.startswith(CONTINUATION) else tail.endswith(bytes(4))
        if not whole:
            raise DataError(f"{path} is truncated: an Arrow stream ends with its end mark, and it does not")
        require(pyarrow, path, stream.schema, column)
        for batch in stream:
            yield _verified(batch, column), mapped.tell()


def _verified(batch: Any, column: str) -> Any:
    batch.column(batch.schema.get_field_index(column)).validate(full=True)
    return batch


def _require_strings(pyarrow: Any, path: Path, schema: Any, column: str) -> None:
    names = schema.names
    if column not in names:
        hint = "" if "input_ids" not in names else "; input_ids are tokens: train on it as data.data_path"
        raise DataError(f"{path}: no column {column!r}; its columns: {', '.join(names)}{hint}")
    kind = schema.field(column).type
    types = pyarrow.types
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise DataError(f"{path}: column {column!r} is {kind}, expected strings")


@contextmanager
def _damage_named(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except DrivetrainError:
        raise
    # pyarrow's own exceptions are subclasses of these; text that is no UTF-8 fails as a ValueError of Python.
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as {kind}: {error}") from error
