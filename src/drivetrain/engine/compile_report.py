"""What torch.compile could not keep in one piece, or had to do again: graph breaks, recompilations, code left eager.

Each is told with the line of Python and the reason, in torch's own words cut to one line.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import drivetrain

__all__ = [
    "CompileReport",
    "GraphBreak",
    "LeftEager",
    "Recompilation",
    "graph_break_of",
    "place_of",
    "recompilation_in_words",
    "recompilation_of",
]

_PACKAGE = Path(drivetrain.__file__).parent
_DISABLED = "Skip calling `torch.compiler.disable()`d function"
_PLACE = re.compile(r"in user code at (?P<file>.+):(?P<line>\d+)\s*$", re.MULTILINE)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_\d+$")
_SIZE = re.compile(
    r"tensor '(?P<tensor>[^']+)' size mismatch at index (?P<index>\d+)\. expected (?P<old>\d+), actual (?P<new>\d+)"
)
_MOST_NAMED = 3
_UNKNOWN = "an unknown place"


@dataclass(frozen=True, order=True)
class GraphBreak:
    """A place at which compiled code ends and Python goes on.

    Attributes:
        place: ``file:line``.
        why: in one line.
        intended: code of ours that is kept out of graphs on purpose, as attention is.
    """

    place: str
    why: str
    intended: bool


@dataclass(frozen=True, order=True)
class Recompilation:
    """Code that was compiled again, because a guard did not hold.

    Attributes:
        function: its name.
        place: ``file:line`` where it begins, or where it goes on behind a graph break.
        why: the guard, in one line.
        expected: an evaluation computes without gradients, and needs code of its own for that.
    """

    function: str
    place: str
    why: str
    expected: bool

    @property
    def sizes(self) -> tuple[str, int, int] | None:
        """Which dimension of which tensor (``x_TD[0]``) had another size, the size before, and the new one; None where
        something else was the reason."""
        found = _SIZE.search(self.why)
        if found is None:
            return None
        return f"{found['tensor']}[{found['index']}]", int(found["old"]), int(found["new"])


@dataclass(frozen=True, order=True)
class LeftEager:
    """Code that was not compiled at all.

    Attributes:
        function: its name.
        place: ``file:line`` of what could not be compiled.
        why: in one line.
    """

    function: str
    place: str
    why: str


@dataclass
class CompileReport:
    """How often each happened.

    Attributes:
        graphs: graphs that were built.
        incomplete: more was compiled at once than torch keeps records of, so that recompilations may be missing.
    """

    graphs: int = 0
    breaks: Counter[GraphBreak] = field(default_factory=Counter)
    recompilations: Counter[Recompilation] = field(default_factory=Counter)
    left_eager: Counter[LeftEager] = field(default_factory=Counter)
    incomplete: bool = False

    def to_document(self) -> dict[str, Any]:
        """As events and summaries hold it: lists of dictionaries with ``count``."""

        def listed(counts: Counter[Any]) -> list[dict[str, Any]]:
            return [{**asdict(one), "count": counts[one]} for one in sorted(counts)]

        return {
            "graphs": self.graphs,
            "graph_breaks": listed(self.breaks),
            "recompilations": listed(self.recompilations),
            "left_eager": listed(self.left_eager),
            "incomplete": self.incomplete,
        }

    def complaints(self) -> list[str]:
        """What costs time and was not meant to be; empty: nothing."""
        return list(self._complaints())

    def _complaints(self) -> Iterator[str]:
        breaks = {one: count for one, count in self.breaks.items() if not one.intended}
        if breaks:
            named = _named([f"{one.place} ({one.why})" for one in sorted(breaks)])
            yield f"graphs break at {_number(len(breaks), 'place')} that nobody meant them to: {named}"
        again = {one: count for one, count in self.recompilations.items() if not one.expected}
        if again:
            total = sum(again.values())
            named = _named([recompilation_in_words(one) for one in sorted(again)])
            yield f"code was compiled again {_number(total, 'time')}: {named}"
        if self.left_eager:
            named = _named([f"{one.function} at {one.place} ({one.why})" for one in sorted(self.left_eager)])
            total = sum(self.left_eager.values())
            yield f"torch.compile gave up on {_number(total, 'piece')} of code, which ran eagerly: {named}"
        if self.incomplete:
            yield "more was compiled at once than torch keeps records of: recompilations may be missing here"


def recompilation_in_words(one: Recompilation) -> str:
    """One recompilation, by the sizes where these were the reason."""
    if one.sizes is not None:
        dimension, old, new = one.sizes
        return f"{one.function} at {one.place}, as {dimension} was {old} and became {new}"
    return f"{one.function} at {one.place} ({one.why})"


def graph_break_of(message: str) -> GraphBreak:
    """The graph break that a line of torch's log ``graph_breaks`` tells of.

    What cannot be found in it is said to be unknown: the words of another version are no reason to fail.
    """
    place, reason = _PLACE.search(message), message.partition("Graph Break Reason: ")[2]
    if place is None:
        # The whole function is passed over; the last frame of its traceback is where it broke.
        head = message.partition("\nTraceback ")[0]
        frames = list(_FRAME.finditer(head))
        place = frames[-1] if frames else None
    where = _UNKNOWN if place is None else place_of(place["file"], int(place["line"]))
    text = (reason or message).partition("\n\nUser code traceback:")[0]
    why = _one_reason(text)
    ours = place is not None and Path(place["file"]).is_relative_to(_PACKAGE)
    return GraphBreak(where, why, intended=ours and why.startswith(_DISABLED))


def recompilation_of(function: str, file: str, line: int, reason: str) -> Recompilation:
    """The recompilation of a function that begins at a line, by torch's words for the guard that failed."""
    resumed = _RESUMED.match(function)
    why = " ".join(re.sub(r"^\d+/\d+: ", "", reason).split())
    return Recompilation(
        function if resumed is None else resumed["name"],
        place_of(file, line),
        why,
        expected=why.startswith("GLOBAL_STATE changed: grad_mode"),
    )


def place_of(file: str, line: int) -> str:
    """``file:line``; of installed packages and of ours from the package's name on."""
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        path = path.relative_to(_PACKAGE.parent)
    elif "site-packages" in path.parts:
        path = Path(*path.parts[path.parts.index("site-packages") + 1 :])
    return f"{path}:{line}"


def _one_reason(text: str) -> str:
    """Title and explanation of the first reason in a text, in one line and without addresses."""
    lines = [line for line in text.splitlines() if line.strip()]
    explained = next((place for place, line in enumerate(lines) if line.startswith("  Explanation: ")), None)
    if explained is None:
        chosen = lines[:1]
    else:
        chosen = [lines[explained - 1] if explained else "", lines[explained].removeprefix("  Explanation: ")]
    words = ": ".join(line.strip() for line in chosen if line.strip()) or "no reason is given"
    return _ADDRESS.sub("", words).removesuffix(" (reason: None)")


def _named(texts: list[str]) -> str:
    more = f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return "; ".join(texts[:_MOST_NAMED]) + more


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
