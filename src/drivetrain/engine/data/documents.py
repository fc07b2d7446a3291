"""Reading text: files, folders, JSON lines and Parquet, as one deterministic stream of documents."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from drivetrain.errors import DataError, EnvironmentFault

__all__ = ["Document", "Source", "discover", "read_documents"]

JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
PARQUET = (".parquet",)


@dataclass(frozen=True)
class Source:
    """One file to read.

    Attributes:
        path: the file.
        kind: ``text`` (one document), ``jsonl`` (one a line) or ``parquet`` (one a row).
        named: the user named this file; one found in a folder may be skipped, a named one may not.
        size: bytes on disk.
    """

    path: Path
    kind: str
    named: bool
    size: int


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        text: its text.
        consumed: bytes of its source, for progress.
    """

    text: str
    consumed: int


def discover(inputs: Sequence[str | Path]) -> tuple[list[Source], Counter[str]]:
    """All files behind ``inputs``, in the order given, folders sorted by path; and what was passed over.

    Hidden files and folders (a leading dot) inside a folder are passed over and counted.

    Raises:
        DataError: no inputs, or an input does not exist.
    """
    if not inputs:
        raise DataError("no input; give at least one text file, folder, .jsonl or .parquet file")
    skipped: Counter[str] = Counter()
    sources: list[Source] = []
    for given in map(Path, inputs):
        if given.is_dir():
            sources.extend(_walk(given, skipped))
        elif given.is_file():
            # Megatron's tools call JSON lines .json; inside a folder a .json is a text like any other.
            kind = "jsonl" if given.suffix.lower() == ".json" else _kind(given)
            sources.append(Source(given, kind, named=True, size=given.stat().st_size))
        else:
            raise DataError(f"input {str(given)!r} does not exist")
    return sources, skipped


def _kind(path: Path) -> str:
    suffix = path.suffix.lower()
    return "jsonl" if suffix in JSON_LINES else "parquet" if suffix in PARQUET else "text"


def _walk(folder: Path, skipped: Counter[str]) -> Iterator[Source]:
    try:
        entries = sorted(folder.iterdir(), key=lambda path: path.name)
    except OSError as error:
        raise DataError(f"folder {str(folder)!r} cannot be read: {error.strerror}") from error
    for path in entries:
        if path.name.startswith("."):
            skipped["hidden files and folders"] += 1
        elif path.is_dir():
            # A link to a folder may lead back up.
            if path.is_symlink():
                skipped["linked folders"] += 1
            else:
                yield from _walk(path, skipped)
        elif path.is_file():
            yield Source(path, _kind(path), named=False, size=path.stat().st_size)
        else:
            skipped["special files and broken links"] += 1


def read_documents(sources: Sequence[Source], json_key: str, skipped: Counter[str]) -> Iterator[Document]:
    """Every non-empty document, in order. What is left out is counted in ``skipped``.

    Raises:
        DataError: a named file is no text, a JSON line is malformed (file:line), a column is missing.
        EnvironmentFault: Parquet without pyarrow.
    """
    readers = {"text": _read_text, "jsonl": _read_json_lines, "parquet": _read_parquet}
    for source in sources:
        for document in readers[source.kind](source, json_key, skipped):
            if document.text:
                yield document
            else:
                skipped["empty documents"] += 1


def _read_text(source: Source, json_key: str, skipped: Counter[str]) -> Iterator[Document]:
    del json_key
    try:
        content = source.path.read_bytes()
    except OSError as error:
        if source.named:
            raise DataError(f"{source.path} cannot be read: {error.strerror}") from error
        skipped["unreadable files"] += 1
        return
    try:
        if b"\0" in content:
            raise ValueError("it holds zero bytes")
        text = content.decode("utf-8")
    except ValueError as error:
        if source.named:
            raise DataError(f"{source.path} is no UTF-8 text: {error}") from error
        skipped["files that are no UTF-8 text"] += 1
        return
    yield Document(text, source.size)


def _read_json_lines(source: Source, json_key: str, skipped: Counter[str]) -> Iterator[Document]:
    del skipped
    try:
        with source.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Document(_json_text(line, json_key, f"{source.path}:{number}"), len(line))
    except OSError as error:
        raise DataError(f"{source.path} cannot be read: {error.strerror}") from error


def _json_text(line: bytes, json_key: str, where: str) -> str:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: no JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object, found {type(record).__name__}")
    if json_key not in record:
        keys = ", ".join(map(repr, list(record)[:10])) or "none"
        raise DataError(f"{where}: no key {json_key!r}; its keys: {keys}")
    text = record[json_key]
    if not isinstance(text, str):
        raise DataError(f"{where}: {json_key!r} is {type(text).__name__}, expected a string")
    return text


def _read_parquet(source: Source, json_key: str, skipped: Counter[str]) -> Iterator[Document]:
    del skipped
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentFault(
            f"{source.path}: reading Parquet needs pyarrow, which is not installed; "
            "`pip install 'drivetrain[train]'`"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            names = file.schema_arrow.names
            if json_key not in names:
                raise DataError(f"{source.path}: no column {json_key!r}; its columns: {', '.join(names)}")
            column = file.schema_arrow.field(json_key).type
            if not (pyarrow.types.is_string(column) or pyarrow.types.is_large_string(column)):
                raise DataError(f"{source.path}: column {json_key!r} is {column}, expected strings")
            share = source.size // max(1, file.metadata.num_rows)
            for batch in file.iter_batches(columns=[json_key], batch_size=1024):
                for text in batch.column(0).to_pylist():
                    yield Document(text or "", share)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{source.path} cannot be read as Parquet: {error}") from error
