"""The corpus every machine has: the source of Python's own standard library."""

import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivetrain.archive.atomic import write_fault
from drivetrain.engine.data.indexed import IndexedReader, index_path, tokens_path
from drivetrain.engine.data.meta import fingerprints, read_meta
from drivetrain.engine.data.prepare import prepare_sources, tokenizer_path_of
from drivetrain.engine.data.progress import Progress, ProgressCallback, silent
from drivetrain.engine.data.sources.source import Source
from drivetrain.engine.data.tokenizer import SMALLEST_VOCABULARY, load_tokenizer, tokenizer_hash
from drivetrain.errors import DataError
from drivetrain.measure.corpora import standard_library_prefix

__all__ = ["only_one", "standard_library_corpus"]

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})


def standard_library_corpus(
    vocab_size: int, cache_dir: str | Path | None = None, progress: ProgressCallback = silent
) -> str:
    """Prefix of the standard library's source as a corpus; prepared on first use, once.

    Several processes may ask at the same time: one prepares, the others wait for it. One that is killed
    midway leaves nothing that is taken for a corpus.

    Args:
        vocab_size: ids the tokenizer may have; the text may yield fewer, which the corpus' facts say.
        cache_dir: by default ``cache_folder()``.
        progress: called as the work proceeds.
    Raises:
        DataError: a vocabulary too small for bytes, or no source on this machine.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"the standard-library corpus is byte-level: model.vocab_size = {vocab_size} is too small, "
            f"the smallest is {SMALLEST_VOCABULARY}; or give data.data_path"
        )
    prefix = standard_library_prefix(vocab_size, cache_dir)
    folder, version = prefix.parent, platform.python_version()
    if _is_whole(prefix, progress):
        return str(prefix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_fault(folder, error, "set DRIVETRAIN_CACHE to a folder for the corpus") from error
    with only_one(folder / "lock", progress):
        if not _is_whole(prefix, progress):
            # Under the lock nobody else writes here: these are what a killed process left.
            for leftover in (*folder.glob("*.tmp-*"), *folder.glob(".*.tmp")):
                leftover.unlink(missing_ok=True)
            sources = _standard_library()
            prepare_sources(
                sources,
                prefix,
                tokenizer=None,
                vocab_size=vocab_size,
                described_as=(f"Python {version} standard library",),
                skipped=Counter(),
                progress=progress,
            )
    return str(prefix)


def _is_whole(prefix: Path, progress: ProgressCallback) -> bool:
    if not index_path(prefix).exists():
        return False
    try:
        IndexedReader(prefix)
        meta = read_meta(prefix)
        tokenizer_sha256 = tokenizer_hash(load_tokenizer(tokenizer_path_of(prefix)))
    except DataError as error:
        progress(Progress(f"preparing the corpus again: {error}"))
        return False
    present = fingerprints(tokens_path(prefix), index_path(prefix))
    if meta is None or meta.files != present or meta.tokenizer_sha256 != tokenizer_sha256:
        progress(Progress("preparing the corpus again: its files are not those that were written"))
        return False
    return True


def _standard_library() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - EXCLUDED_FOLDERS)
        paths.extend(Path(folder, name) for name in files if name.endswith(".py"))
    if not paths:
        raise DataError(
            f"no Python source in {root}: give data.data_path (`drivetrain data prepare` makes one)"
        )
    # Not "named": a file in another encoding is skipped and counted.
    return [
        Source(path, "text", named=False, size=path.stat().st_size)
        for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix())
    ]


@contextmanager
def only_one(path: Path, progress: ProgressCallback) -> Iterator[None]:
    """Hold an exclusive lock; the system releases it when the process dies, however it dies."""
    try:
        import fcntl
    except ImportError:
        # Without fcntl two processes may both prepare: temporary names differ and the bytes are equal.
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(Progress("waiting for another process that prepares the same corpus"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
