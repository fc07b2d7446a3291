"""What is being prepared, and whether work that was ended midway is the same."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from drivetrain.archive.atomic import write_json
from drivetrain.engine.data.meta import CorpusMeta, read_meta
from drivetrain.engine.data.partial import finish_publishing, partial_path
from drivetrain.engine.data.progress import Progress, ProgressCallback
from drivetrain.engine.data.sources.source import Source
from drivetrain.errors import DataError

__all__ = ["Work", "discard", "discard_without_parts", "has_parts", "only_this_process", "take_up_or_begin"]

RULE = 2
"""Changes when the same inputs and options would give other bytes."""


@dataclass(frozen=True)
class Work:
    """All that decides on the bytes of a corpus.

    Attributes:
        sources: the files, known by path, size and time of their last change.
        tokenizer: a tokenizer.json; None: it is learned.
        vocab_size: ids that it is to have then.
        tokenizer_text_bytes: about as much text it learns from.
        json_key, eod_token, drop_duplicates, strict: see ``prepare.Options``.
    """

    sources: tuple[Source, ...]
    tokenizer: str | None
    vocab_size: int | None
    tokenizer_text_bytes: int
    json_key: str
    eod_token: str | None
    drop_duplicates: bool
    strict: bool

    def to_json(self) -> dict[str, Any]:
        """By what it is known."""
        inputs = hashlib.sha256()
        for source in self.sources:
            changed = source.path.stat().st_mtime_ns
            inputs.update(
                f"{os.path.abspath(source.path)}\0{source.kind}\0{source.size}\0{changed}\n".encode()
            )
        return {
            "schema": 1,
            "rule": RULE,
            "inputs": inputs.hexdigest(),
            "tokenizer": hashlib.sha256(self.tokenizer.encode()).hexdigest() if self.tokenizer else None,
            "vocab_size": self.vocab_size,
            "tokenizer_text_bytes": self.tokenizer_text_bytes,
            "json_key": self.json_key,
            "eod_token": self.eod_token,
            "drop_duplicates": self.drop_duplicates,
            "strict": self.strict,
        }


@contextmanager
def only_this_process(prefix: str | Path) -> Iterator[None]:
    """Hold the folder of unfinished work, made where it is missing.

    Raises:
        DataError: another process prepares the same corpus.
    """
    folder = partial_path(prefix)
    folder.mkdir(exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another process is preparing {prefix}: wait for it, or give another --output"
            ) from error
        yield


def take_up_or_begin(prefix: str | Path, work: Work, progress: ProgressCallback) -> CorpusMeta | None:
    """Make the folder ready for ``work``: what is there of the same work stays, of other work it goes.

    Returns:
        The facts of the corpus, where the last that was left to do was to let it appear, which is done now.
    """
    folder = partial_path(prefix)
    wanted, stored = work.to_json(), _stored(folder)
    if stored == wanted:
        # What was killed while the corpus appeared has written its facts before.
        return read_meta(prefix) if finish_publishing(prefix) else None
    if has_parts(prefix):
        differing = [name for name in wanted if stored is None or stored.get(name) != wanted[name]]
        progress(
            Progress(
                f"what is in {folder} is thrown away: it is of other work ({', '.join(differing)} changed)"
            )
        )
    for path in folder.iterdir():
        if path.name != "lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_json(folder / "work.json", wanted)
    return None


def _stored(folder: Path) -> Any:
    try:
        return orjson.loads((folder / "work.json").read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None


def has_parts(prefix: str | Path) -> bool:
    """Whether a part of the corpus is finished."""
    journal = partial_path(prefix) / "journal"
    return journal.exists() and journal.stat().st_size > 0


def discard(prefix: str | Path) -> None:
    """Remove the folder of unfinished work."""
    shutil.rmtree(partial_path(prefix), ignore_errors=True)


def discard_without_parts(prefix: str | Path) -> None:
    """Remove the folder of unfinished work where no part is finished: there is nothing to go on from."""
    if not has_parts(prefix):
        discard(prefix)
