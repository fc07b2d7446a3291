"""What a shell script is made of, before anything has a value: words with their parts, and statements."""

from dataclasses import dataclass

__all__ = [
    "Arithmetic",
    "Assignment",
    "Case",
    "Chain",
    "If",
    "Literal",
    "Other",
    "Part",
    "Simple",
    "Statement",
    "Substitution",
    "Variable",
    "Word",
    "DECLARING",
]

DECLARING = ("export", "declare", "local", "readonly", "typeset")
"""Commands whose words may be assignments."""


@dataclass(frozen=True)
class Literal:
    """Characters as they stand."""

    text: str
    quoted: bool


@dataclass(frozen=True)
class Variable:
    """``$NAME`` or ``${NAME…}``.

    Attributes:
        name: of the variable, or one of ``@ * # ? $ ! - 0 1 …``.
        index: ``@`` or ``*`` of an array, or the text of an index; None: none.
        operator: ``:-``, ``-``, ``:=``, ``=``, ``:+``, ``+``, ``:?``, ``?``; empty: none; ``other``: one that is not
            understood here, such as ``%`` or ``//``.
        alternative: behind the operator.
    """

    name: str
    index: str | None
    operator: str
    alternative: "Word | None"
    quoted: bool


@dataclass(frozen=True)
class Arithmetic:
    """``$((…))``."""

    text: str
    quoted: bool


@dataclass(frozen=True)
class Substitution:
    """``$(…)`` or backquotes: the output of a command, which nobody runs."""

    text: str
    quoted: bool


Part = Literal | Variable | Arithmetic | Substitution


@dataclass(frozen=True)
class Word:
    """One word of the source, before expansion."""

    parts: tuple[Part, ...]
    line: int

    @property
    def plain(self) -> str | None:
        """Its text, where all of it is literal."""
        texts = [part.text for part in self.parts if isinstance(part, Literal)]
        return "".join(texts) if len(texts) == len(self.parts) else None

    @property
    def keyword(self) -> str | None:
        """Its text, where it is literal and nothing of it was quoted."""
        if any(not isinstance(part, Literal) or part.quoted for part in self.parts):
            return None
        return self.plain


@dataclass(frozen=True)
class Assignment:
    """``NAME=word``, ``NAME+=word``, ``NAME=(words)``."""

    name: str
    appends: bool
    value: Word | tuple[Word, ...]
    line: int


@dataclass(frozen=True)
class Simple:
    """A command with what is assigned before it."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True)
class Chain:
    """Commands with what stands before each: ``;``, ``&&``, ``||`` or ``|``."""

    members: tuple[tuple[str, "Statement"], ...]


@dataclass(frozen=True)
class If:
    """Conditions with their bodies; the last condition is None where there is an ``else``."""

    branches: tuple[tuple["Chain | None", "Chain"], ...]
    line: int


@dataclass(frozen=True)
class Case:
    """``case word in pattern) body ;; esac``."""

    word: Word
    branches: tuple[tuple[tuple[Word, ...], Chain], ...]
    line: int


@dataclass(frozen=True)
class Other:
    """A loop or a function: what runs how often is not known here.

    Attributes:
        names: variables that its head assigns.
    """

    what: str
    names: tuple[str, ...]
    body: Chain
    line: int


Statement = Simple | Chain | If | Case | Other
