"""Whatever ``data.data_path`` names, as documents of token ids."""

from pathlib import Path

from drivetrain.engine.data.formats.detect import first_bytes, foreign_format
from drivetrain.engine.data.formats.id_tables import id_table_files, open_id_table
from drivetrain.engine.data.formats.raw import RawReader
from drivetrain.engine.data.indexed import IndexedReader, index_path
from drivetrain.engine.data.progress import ProgressCallback, silent
from drivetrain.engine.data.reader import TokenReader
from drivetrain.errors import DataError

__all__ = ["open_tokens"]


def open_tokens(path: str | Path, progress: ProgressCallback = silent) -> TokenReader:
    """The corpus at ``path``: a prefix of ``.bin`` and ``.idx``, a ``.bin`` of nanoGPT or llm.c, Parquet or a saved
    data set with ``input_ids``.

    Raises:
        DataError: nothing there, damaged, or of a kind that holds no token ids.
    """
    file = Path(path)
    if index_path(path).exists():
        return IndexedReader(path)
    tables = id_table_files(file)
    if tables is not None:
        return open_id_table(file, tables, progress)
    if file.is_dir():
        raise DataError(
            f"{str(path)!r} is a folder without Parquet files, and no saved data set or MDS; a corpus is named by its "
            "prefix, as in corpora/mine, or by its file"
        )
    if not file.is_file():
        return IndexedReader(path)  # which says what is missing
    if file.suffix == ".bin" and not file.with_suffix(".idx").exists():
        return RawReader(file)
    if file.suffix in (".bin", ".idx"):
        return IndexedReader(path)  # which says that a corpus is named by its prefix
    kind = foreign_format(first_bytes(file)) or "no file of token ids"
    raise DataError(
        f"{file} is {kind}; readable are a prefix of .bin and .idx (Megatron), a .bin of nanoGPT or llm.c, Parquet "
        "with input_ids, and folders of MDS. Text becomes a corpus with `drivetrain data prepare`"
    )
