"""Which files stand behind the inputs of ``data prepare``."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

from drivetrain.engine.data.sources.mds_shards import mds_index
from drivetrain.engine.data.sources.source import Source
from drivetrain.errors import DataError

__all__ = ["COMPRESSED", "discover", "saved_data_set"]

JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
COMPRESSED = (".gz", ".zst", ".zstd")
TABLES = {".parquet": "parquet", ".arrow": "arrow"}
ARCHIVES = (".tar", ".tgz")
SHARD = ".mds"


def discover(inputs: Sequence[str | Path]) -> tuple[list[Source], Counter[str]]:
    """All files behind ``inputs``, in the order given, folders sorted by path; and what was passed over.

    Hidden files and folders (a leading dot) inside a folder are passed over and counted. A folder that the
    ``datasets`` library saved stands for its Arrow files, and one of MDS for the shards that its index names.

    Raises:
        DataError: no inputs, or an input does not exist; a saved data set of several splits; MDS whose index does not
            fit its shards.
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
            kind = "jsonl" if _bare_suffix(given) == ".json" else _kind(given)
            sources.append(Source(given, kind, named=True, size=given.stat().st_size))
        else:
            raise DataError(f"input {str(given)!r} does not exist")
    return sources, skipped


def saved_data_set(folder: Path) -> list[Path] | None:
    """The Arrow files of a folder that ``datasets.Dataset.save_to_disk`` wrote, in order; None for another folder.

    Raises:
        DataError: the folder holds several splits, or names files that are not there.
    """
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = _document(splits).get("splits")
        known = (
            ", ".join(str(folder / str(name)) for name in names) if isinstance(names, list) else "its folders"
        )
        raise DataError(f"{folder} is a saved data set of several splits; give one of them: {known}")
    state = folder / "state.json"
    if not (state.is_file() and (folder / "dataset_info.json").is_file()):
        return None
    files = _document(state).get("_data_files")
    if not isinstance(files, list) or not all(
        isinstance(file, dict) and isinstance(file.get("filename"), str) for file in files
    ):
        raise DataError(f"{state} is damaged: it names no _data_files")
    paths = [folder / Path(file["filename"]).name for file in files]
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        raise DataError(f"{state} names {missing.name}, which is not there")
    return paths


def _document(path: Path) -> dict[str, object]:
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged: an object is expected, found {type(value).__name__}")
    return value


def _bare_suffix(path: Path) -> str:
    """The suffix before that of a compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def _kind(path: Path) -> str:
    if _bare_suffix(path) in JSON_LINES:
        return "jsonl"
    if _bare_suffix(path) in ARCHIVES:
        return "webdataset"
    if _bare_suffix(path) == SHARD:
        return "mds"
    return TABLES.get(path.suffix.lower(), "text")


def _walk(folder: Path, skipped: Counter[str]) -> Iterator[Source]:
    saved = saved_data_set(folder)
    if saved is not None:
        for path in saved:
            yield Source(path, "arrow", named=True, size=path.stat().st_size)
        return
    shards = mds_index(folder)
    if shards is not None:
        for shard in shards:
            size = shard.path.stat().st_size
            yield Source(shard.path, "mds", named=True, size=size, checksum=shard.checksum)
        return
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
