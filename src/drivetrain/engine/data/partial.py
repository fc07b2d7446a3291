"""A corpus that is being prepared: what is finished of it survives whatever ends the work.

``<prefix>.partial/`` holds

==================  ===================================================================================
``work.json``       what is being prepared: inputs, tokenizer, options. Other work does not go on from it
``tokenizer.json``  the tokenizer, once it is learned
``tokens``          token ids so far, as they will be in ``<prefix>.bin``
``documents``       a record of each document so far: digest and number of tokens
``journal``         one JSON line for each finished part: totals, where reading goes on, SHA-256 of the part
``index``           the index, when all parts are there
``publishing``      says that the facts are in place and that nothing is left but to move tokens and index
==================  ===================================================================================

A part counts once its line in the journal is on the disk, after its tokens and documents. What lies behind the last
sound part is cut off when the work goes on.
"""

import hashlib
import os
import shutil
from collections import Counter
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from drivetrain.archive.atomic import sync_folder, write_bytes
from drivetrain.engine.data.indexed import index_bytes, index_path, tokens_path
from drivetrain.engine.data.sources.source import START, Position, Report

__all__ = ["RECORD", "PartialCorpus", "Totals", "finish_publishing", "partial_path"]

RECORD = np.dtype([("digest", "<u8", (2,)), ("length", "<i4")])
AT_ONCE = 1 << 24


def partial_path(prefix: str | Path) -> Path:
    """The folder of a corpus that is being prepared."""
    return Path(f"{prefix}.partial")


@dataclass
class Totals:
    """What is in a corpus so far.

    Attributes:
        tokens, documents, text_bytes, max_id: counts; max_id is -1 for no tokens.
        duplicates: documents that are equal to an earlier one.
        open_tokens: tokens of a document that is not at its end; None where none is open.
        consumed: bytes of the inputs, on disk, that are behind.
        position: where reading goes on.
        report: what was left out.
    """

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    max_id: int = -1
    duplicates: int = 0
    consumed: int = 0
    open_tokens: int | None = None
    position: Position = START
    report: Report = field(default_factory=Report)

    def to_json(self) -> dict[str, Any]:
        """As the journal keeps it."""
        position, report = self.position, self.report
        return {
            **{name: getattr(self, name) for name in _NUMBERS},
            "open_tokens": self.open_tokens,
            "position": [position.source, position.offset, position.line],
            "skipped": dict(report.skipped),
            "broken": report.broken,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """What ``to_json`` gave. Raises KeyError, TypeError or ValueError for anything else."""
        open_tokens = value["open_tokens"]
        return cls(
            **{name: int(value[name]) for name in _NUMBERS},
            open_tokens=None if open_tokens is None else int(open_tokens),
            position=Position(*map(int, value["position"])),
            report=Report(Counter(dict(value["skipped"])), list(map(str, value["broken"]))),
        )


_NUMBERS = ("tokens", "documents", "text_bytes", "max_id", "duplicates", "consumed")


@dataclass(frozen=True)
class _Sound:
    """The parts that are what was written: their number, the totals behind them, bytes of the journal about them."""

    num_parts: int
    totals: Totals
    journal_bytes: int
    damage: str | None


class PartialCorpus:
    """The folder of one piece of work, held open. Files are written without a buffer of their own.

    Args:
        prefix: of the corpus; the folder ``<prefix>.partial`` exists.
        dtype: of a stored token id.
    Attributes:
        totals: what is in it, the part at hand included; the caller counts.
        num_parts: finished parts.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any]) -> None:
        self.prefix = prefix
        self.folder = partial_path(prefix)
        self.totals = Totals()
        self.num_parts = 0
        self._dtype = dtype
        self._files = {name: FileIO(self.folder / name, "a+") for name in ("tokens", "documents", "journal")}
        self._digests = {name: hashlib.sha256() for name in ("tokens", "documents")}

    def take_up(self) -> str | None:
        """Verify the parts that are there and cut off what lies behind them; what was damaged in words, if anything."""
        sound = self._sound()
        self.num_parts, self.totals = sound.num_parts, sound.totals
        # The journal first: cut off anywhere in here, the next start finds the same parts.
        self._files["journal"].truncate(sound.journal_bytes)
        self._files["tokens"].truncate(self.totals.tokens * self._dtype.itemsize)
        self._files["documents"].truncate(self.totals.documents * RECORD.itemsize)
        return sound.damage

    def _sound(self) -> _Sound:
        totals, end, number = Totals(), 0, 0
        content = (self.folder / "journal").read_bytes()
        for name in ("tokens", "documents"):
            self._files[name].seek(0)
        while end < len(content):
            line, newline, _ = content[end:].partition(b"\n")
            damage = f"part {number + 1} is not what was written"
            if not newline:
                # A torn line: its part was not finished.
                return _Sound(number, totals, end, None)
            try:
                value = orjson.loads(line)
                after = Totals.from_json(value)
                expected = {name: value[f"{name}_sha256"] for name in self._digests}
            except (ValueError, KeyError, TypeError):
                return _Sound(number, totals, end, damage)
            sizes = {
                "tokens": (after.tokens - totals.tokens) * self._dtype.itemsize,
                "documents": (after.documents - totals.documents) * RECORD.itemsize,
            }
            if any(_sha256(self._files[name], size) != expected[name] for name, size in sizes.items()):
                return _Sound(number, totals, end, damage)
            totals, number = after, number + 1
            end += len(line) + 1
        return _Sound(number, totals, end, None)

    def records(self) -> NDArray[Any]:
        """(documents,) RECORD of all documents so far."""
        return np.fromfile(self.folder / "documents", dtype=RECORD)

    def append(self, tokens: NDArray[Any], records: NDArray[Any]) -> None:
        """Add tokens, and records of documents that are at their end, to the part at hand."""
        for name, data in (("tokens", tokens.tobytes()), ("documents", records.tobytes())):
            _write(self._files[name], data)
            self._digests[name].update(data)

    def finish_part(self) -> None:
        """Bring the part at hand to the disk: from now on it is kept."""
        for name in self._digests:
            os.fsync(self._files[name].fileno())
        digests = {f"{name}_sha256": digest.hexdigest() for name, digest in self._digests.items()}
        _write(self._files["journal"], orjson.dumps({**self.totals.to_json(), **digests}) + b"\n")
        os.fsync(self._files["journal"].fileno())
        self._digests = {name: hashlib.sha256() for name in self._digests}
        self.num_parts += 1

    def seal(self) -> tuple[Path, Path]:
        """Write the index; the files of tokens and index, still in the folder."""
        self.close()
        lengths = np.ascontiguousarray(self.records()["length"])
        write_bytes(self.folder / "index", index_bytes(lengths, self._dtype))
        return self.folder / "tokens", self.folder / "index"

    def publish(self) -> None:
        """Make the corpus appear. Killed at any point, a reader finds the old corpus, none or the new one."""
        write_bytes(self.folder / "publishing", b"")
        finish_publishing(self.prefix)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def finish_publishing(prefix: str | Path) -> bool:
    """Move what is left of a corpus to its place, where nothing else is left to do; whether that was so."""
    folder = partial_path(prefix)
    if not (folder / "publishing").exists():
        return False
    if (folder / "tokens").exists():
        # An old index beside new tokens could fit by chance, so it goes first; the new one comes last.
        index_path(prefix).unlink(missing_ok=True)
        (folder / "tokens").replace(tokens_path(prefix))
    if (folder / "index").exists():
        (folder / "index").replace(index_path(prefix))
    sync_folder(Path(prefix).parent)
    shutil.rmtree(folder)
    return True


def _write(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _sha256(file: FileIO, size: int) -> str | None:
    """Of the next ``size`` bytes; None where there are not as many."""
    digest = hashlib.sha256()
    while size > 0:
        data = file.read(min(size, AT_ONCE))
        if not data:
            return None
        digest.update(data)
        size -= len(data)
    return digest.hexdigest() if size == 0 else None
