"""What is read, where reading stands, and the blocks that are handed to whoever encodes them."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "START",
    "Block",
    "Content",
    "FileTexts",
    "Fragment",
    "LeftOut",
    "Lines",
    "Position",
    "Reading",
    "Report",
    "Rows",
    "Sample",
    "Samples",
    "Source",
]

MOST_PLACES = 20
"""As many broken lines are named; all are counted."""


@dataclass(frozen=True)
class Source:
    """One file to read.

    Attributes:
        path: the file.
        kind: ``text`` (one document), ``jsonl`` (one a line), ``parquet`` or ``arrow`` (one a row), ``mds`` or
            ``webdataset`` (one a sample).
        named: the user named this file; one found in a folder may be skipped, a named one may not.
        size: bytes on disk.
        checksum: algorithm and hexadecimal digest of the file, where the data set says them.
    """

    path: Path
    kind: str
    named: bool
    size: int
    checksum: tuple[str, str] | None = None


@dataclass(frozen=True)
class Position:
    """Where reading goes on.

    Attributes:
        source: number of the source; of the next one where a source is done.
        offset: bytes of it (after decompression) or rows of it that are behind.
        line: lines of it that are behind.
    """

    source: int = 0
    offset: int = 0
    line: int = 0


START = Position()
"""Before everything."""


@dataclass(frozen=True)
class Reading:
    """How sources are read.

    Attributes:
        json_key: key of the text in JSON lines, and its column in tables.
        strict: a broken JSON line is an error, instead of being counted and left out.
        split_long: long text files may be cut where a byte-level tokenizer cuts too.
        block_bytes: about as much text is in a block.
    """

    json_key: str = "text"
    strict: bool = False
    split_long: bool = False
    block_bytes: int = 1 << 20


@dataclass
class Report:
    """What was left out.

    Attributes:
        skipped: how often, by reason.
        broken: ``file:line: reason`` of the first broken lines.
    """

    skipped: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def broken_line(self, place: str) -> None:
        """Count a line that could not be used."""
        self.skipped["broken JSON lines"] += 1
        self._keep(place)

    def broken_sample(self, place: str) -> None:
        """Count a sample that holds no text."""
        self.skipped["samples without text"] += 1
        self._keep(place)

    def _keep(self, place: str) -> None:
        if len(self.broken) < MOST_PLACES:
            self.broken.append(place)

    def add(self, other: "Report") -> None:
        """Count what another report counted, after this one."""
        self.skipped.update(other.skipped)
        self.broken.extend(other.broken[: MOST_PLACES - len(self.broken)])


@dataclass(frozen=True)
class FileTexts:
    """Text files, each a document."""

    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Lines:
    """Whole lines of a file of JSON lines; ``lines_before`` stand before them."""

    path: Path
    data: bytes
    lines_before: int


@dataclass(frozen=True)
class Rows:
    """Texts of rows of a table; None where there is none."""

    texts: tuple[str | None, ...]


@dataclass(frozen=True)
class Sample:
    """One sample of a data set.

    Attributes:
        name: as the data set names it.
        form: ``text`` (UTF-8), ``json`` (a string), ``object`` (JSON with the text under ``Reading.json_key``), or
            ``none``, where data names what it has instead.
        data: as the file holds it.
    """

    name: str
    form: str
    data: bytes


@dataclass(frozen=True)
class Samples:
    """Consecutive samples of a file."""

    path: Path
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Fragment:
    """A part of one long document.

    Attributes:
        data: UTF-8 text.
        last: the document ends here.
        digest: of the whole document (:func:`drivetrain.engine.data.duplicates.digest`).
    """

    data: bytes
    last: bool
    digest: bytes


@dataclass(frozen=True)
class LeftOut:
    """A source that cannot be used; ``reason`` is counted."""

    reason: str


Content = FileTexts | Lines | Rows | Samples | Fragment | LeftOut


@dataclass(frozen=True)
class Block:
    """A piece of the inputs.

    Attributes:
        content: what a worker makes texts of.
        after: where reading goes on behind it.
        read_bytes: bytes on disk of the source ``after.source`` that are behind, for progress.
    """

    content: Content
    after: Position
    read_bytes: int = 0
