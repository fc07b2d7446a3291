"""What a part of ``gpu.py`` has found, in its file after each row: whatever ends the part, they are kept."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from drivetrain.archive.atomic import write_json
from drivetrain.measure.statistics import percentile

__all__ = ["COPY", "DRY", "PRODUCTS", "Record", "Row", "Status", "Verdict", "times_in_words"]

COPY = "copy"
PRODUCTS = "three products"
"""In the place of a backend's name: what backends are held against."""

DRY = "dry: no measurement"
"""In the place of every figure of a dry run."""

Verdict = Literal["right", "wrong", "reached", "missed", "failed", "refused", "left out", "information"]
"""``refused``: the backend says why it cannot serve. ``reached`` and ``missed`` are of a target."""

Status = Literal["running", "done", "failed", "killed", "left out"]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: what was computed, in words.
        backend: by whom.
        said: the figure in words.
        verdict: what became of it.
        ours: whether a backend is one of ours; None where that means nothing.
        times: seconds of each timed call, on the device's clock; empty where nothing was timed.
        figures: numbers by name, with the unit in the name; none in a dry run.
    """

    what: str
    backend: str
    said: str
    verdict: Verdict
    ours: bool | None = None
    times: Sequence[float] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As JSON, with the median and the ends of the middle 80% of the times."""
        summary = None
        if self.times:
            summary = {
                "median_s": median(self.times),
                "p10_s": percentile(self.times, 0.1),
                "p90_s": percentile(self.times, 0.9),
                "calls": len(self.times),
            }
        return {**asdict(self), "times": list(self.times), "time": summary}


def times_in_words(times: Sequence[float], *, dry: bool) -> str:
    """The median in milliseconds with the middle 80%."""
    if dry:
        return DRY
    low, middle, high = (percentile(times, share) * 1e3 for share in (0.1, 0.5, 0.9))
    return f"{middle:.3f} ms [{low:.3f}, {high:.3f}]"


@dataclass
class Record:
    """A part's file.

    Attributes:
        path: of the JSON, replaced after each change.
        part: its name.
        rows: in the order in which they were found.
        left_out: what was not done, and why.
        facts: what holds for the whole part: rules, sizes, sources of figures.
        status: as far as the part itself knows.
        error: a traceback; None where there was none.
    """

    path: Path
    part: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    status: Status = "running"
    error: str | None = None

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.rows.append(row.document())
        self.write()

    def leave_out(self, what: str, why: str) -> None:
        """Say that ``what`` was not done."""
        self.left_out.append(f"{what}: {why}")
        self.write()

    def tell(self, **facts: Any) -> None:
        """Keep facts of the whole part."""
        self.facts.update(facts)
        self.write()

    def end(self, status: Status, error: str | None = None) -> None:
        """How it ended."""
        self.status, self.error = status, error
        self.write()

    def write(self) -> None:
        """The file as things are."""
        document = {name: value for name, value in vars(self).items() if name != "path"}
        write_json(self.path, document, fsync=False)
