"""The values that a launch script gives its words: variables, arrays and decidable conditions, and nothing is run.

What only a shell could tell (the output of a command, a variable of the environment, an argument of the script itself)
stays unknown under its name. Where a condition is unknown, so is everything that its branches would assign.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from drivetrain.config.importing.shell_syntax import parse_script
from drivetrain.config.importing.shell_tree import (
    DECLARING,
    Arithmetic,
    Assignment,
    Case,
    Chain,
    If,
    Literal,
    Other,
    Simple,
    Statement,
    Substitution,
    Variable,
    Word,
)
from drivetrain.config.importing.whole_numbers import whole_number
from drivetrain.errors import ConfigurationError

__all__ = ["Command", "Explain", "Text", "commands_of", "is_absent"]

Explain = Callable[[str], str]
"""Name without a value → why it has none, in words. Raises ConfigurationError where variables need each other."""

_LONGEST = 1_000_000
"""Characters of all values together: a script that doubles a variable fills any memory."""
_WRITES = frozenset({"read", "let", "mapfile", "readarray", "getopts"})
"""Commands that write into the variables they are handed."""
_ABSENT = ("(not set in the file)", "(an argument of the script itself)")
_NUMBER_TESTS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


@dataclass(frozen=True)
class Text:
    """A word after expansion.

    Attributes:
        text: with ``$NAME`` where a value is unknown.
        missing: names, or commands, whose values are unknown.
    """

    text: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command that the script has, with its words expanded."""

    words: tuple[Text, ...]
    line: int


_Value = Text | list[Text]


class _Script:
    """Goes through statements once, in their order."""

    def __init__(self, where: str, given: Mapping[str, str]) -> None:
        self.where = where
        self.commands: list[Command] = []
        self.values: dict[str, _Value] = {name: Text(value) for name, value in given.items()}
        self._given = frozenset(given)
        self._assigned: dict[str, int] = {}
        self._needs: dict[str, set[str]] = {}
        self._length = 0

    # -- statements ---------------------------------------------------------------------------------------------

    def run(self, statement: Statement) -> bool | None:
        """Go through it; whether it would succeed, None where nobody knows."""
        if isinstance(statement, Chain):
            return self._chain(statement)
        if isinstance(statement, If):
            return self._if(statement)
        if isinstance(statement, Case):
            return self._case(statement)
        if isinstance(statement, Other):
            self._leave_open([statement], f"{statement.what} at line {statement.line}")
            return None
        return self._simple(statement)

    def _chain(self, chain: Chain) -> bool | None:
        success: bool | None = True
        for before, member in chain.members:
            if before == "&&" and success is False:
                continue
            if before == "||" and success is not False:
                # What follows || runs where a command failed: an unknown one is taken to do what it is there for.
                if success is None:
                    self._leave_open([member], "a condition that only a shell can decide")
                continue
            if before == "&&" and success is None and self._is_test(chain, member):
                self._leave_open([member], "a condition that only a shell can decide")
                continue
            success = self.run(member)
        return success

    def _is_test(self, chain: Chain, member: Statement) -> bool:
        """Whether what stands right before ``member`` is a test, and no command that is there for its effect."""
        position = next(place for place, (_, one) in enumerate(chain.members) if one is member)
        previous = chain.members[position - 1][1]
        return (
            isinstance(previous, Simple)
            and bool(previous.words)
            and previous.words[0].plain in ("[", "[[", "test")
        )

    def _if(self, statement: If) -> bool | None:
        for place, (condition, body) in enumerate(statement.branches):
            holds = True if condition is None else self.run(condition)
            if holds is None:
                open_branches = [one for _, one in statement.branches[place:]]
                self._leave_open(
                    open_branches, f"the condition at line {statement.line}, which only a shell can decide"
                )
                return None
            if holds:
                return self.run(body)
        return True

    def _case(self, statement: Case) -> bool | None:
        word = self._one(statement.word)
        bodies = [body for _, body in statement.branches]
        if word.missing:
            self._leave_open(bodies, f"the case at line {statement.line}, which only a shell can decide")
            return None
        for patterns, body in statement.branches:
            if any(fnmatch.fnmatchcase(word.text, self._one(pattern).text) for pattern in patterns):
                return self.run(body)
        return True

    def _simple(self, statement: Simple) -> bool | None:
        words = [field for word in statement.words for field in self._fields(word)]
        first = words[0].text if words else ""
        declares = first in DECLARING
        if not words or declares:
            for assignment in statement.assignments:
                self._assign(assignment)
            return True
        if first in ("[", "[[", "test"):
            return self._test([word for word in words[1:] if word.text not in ("]", "]]")])
        self._overwrite(words, statement.line)
        if first == "unset":
            for word in words[1:]:
                self.values.pop(word.text, None)
            return True
        if first in ("true", "set", "shift", "echo", "printf", "mkdir", ":"):
            return True
        if first == "false":
            return False
        self.commands.append(Command(tuple(words), statement.line))
        return None

    def _overwrite(self, words: Sequence[Text], line: int) -> None:
        """What commands write into variables is unknown behind them."""
        first, rest = words[0].text, [word.text for word in words[1:]]
        names: list[str] = []
        if element := re.match(r"([A-Za-z_]\w*)\[[^\]]*\]\+?=", first):
            names = [element[1]]
        elif first in _WRITES:
            names = [found[0] for word in rest if (found := re.match(r"[A-Za-z_]\w*", word))]
        elif first == "printf" and rest[:1] == ["-v"]:
            names = rest[1:2]
        for name in names:
            self._assigned.setdefault(name, line)
            if name not in self._given:
                self.values[name] = Text(f"${name}", (f"{name} (written by {first!r} at line {line})",))

    def _leave_open(self, statements: Iterable[Statement], why: str) -> None:
        """Nobody knows whether, or how often, these run."""
        for statement in statements:
            for assignment in _assignments(statement):
                self._assigned.setdefault(assignment.name, assignment.line)
                if assignment.name not in self._given:
                    self.values[assignment.name] = Text(
                        f"${assignment.name}", (f"{assignment.name} ({why})",)
                    )
            for command in _commands(statement):
                words = [field for word in command.words for field in self._fields(word)]
                if words:
                    self.commands.append(Command(tuple(words), command.line))

    # -- assignments and tests ----------------------------------------------------------------------------------

    def _assign(self, assignment: Assignment) -> None:
        name = assignment.name
        self._assigned.setdefault(name, assignment.line)
        if name in self._given:
            return
        value: _Value
        if isinstance(assignment.value, tuple):
            value = [field for word in assignment.value for field in self._fields(word)]
            words = assignment.value
        else:
            value, words = self._one(assignment.value), (assignment.value,)
        self._needs.setdefault(name, set()).update(self._unknown_names(words))
        if assignment.appends:
            value = _appended(self.values.get(name), value)
        self._count(value)
        self.values[name] = value

    def _unknown_names(self, words: Iterable[Word]) -> Iterator[str]:
        """Variables in ``words`` whose values are not known."""
        for word in words:
            for part in word.parts:
                if isinstance(part, Variable):
                    found = self._lookup(part)
                    if any(one.missing for one in ([found] if isinstance(found, Text) else found)):
                        yield part.name

    def _count(self, value: _Value) -> None:
        # An empty element of an array takes its place as well.
        self._length += sum(len(one.text) + 1 for one in ([value] if isinstance(value, Text) else value))
        if self._length > _LONGEST:
            raise ConfigurationError(
                f"{self.where}: its variables hold more than {_LONGEST:,} characters; it is no list of arguments"
            )

    def _test(self, words: Sequence[Text]) -> bool | None:
        """The answer of ``[ … ]``; None where it is not known."""
        for operator, decides in (("||", True), ("&&", False)):
            if any(word.text == operator for word in words):
                found: bool | None = not decides
                for part in _split(words, operator):
                    answer = self._test(part)
                    if answer is decides:
                        return decides
                    found = None if answer is None else found
                return found
        negations = next((place for place, word in enumerate(words) if word.text != "!"), len(words))
        answer = _simple_test(words[negations:])
        return None if answer is None else answer is not bool(negations % 2)

    # -- words --------------------------------------------------------------------------------------------------

    def _one(self, word: Word) -> Text:
        """A word that is not split, as in an assignment."""
        texts = [self._part(part) for part in word.parts]
        return Text("".join(one.text for one in texts), _missing(texts))

    def _part(self, part: object) -> Text:
        if isinstance(part, Literal):
            return Text(part.text)
        if isinstance(part, Arithmetic):
            return self._arithmetic(part)
        if isinstance(part, Substitution):
            return Text(f"$({part.text[:60]})", (f"the output of the command {part.text[:60].strip()!r}",))
        assert isinstance(part, Variable)
        found = self._lookup(part)
        # Before it is put beside others: a long value that stands in a word many times fills any memory.
        self._count(found)
        if isinstance(found, Text):
            return found
        return Text(" ".join(one.text for one in found), _missing(found))

    def _fields(self, word: Word) -> list[Text]:
        """The words that ``word`` becomes: variables without quotation marks are split at white space."""
        fields: list[list[Text]] = []
        open_field = False

        def add(text: Text) -> None:
            nonlocal open_field
            if not open_field:
                fields.append([])
                open_field = True
            fields[-1].append(text)

        arrays = any(isinstance(part, Variable) and _is_array(part) for part in word.parts)
        for part in word.parts:
            if isinstance(part, Literal):
                # The quotation marks around an array alone make no word: there is none where it is empty.
                if part.text or not arrays:
                    add(Text(part.text))
            elif isinstance(part, Variable) and (_is_array(part) or not part.quoted):
                found = self._lookup(part)
                pieces = found if isinstance(found, list) else [found]
                self._count(pieces)
                spaces = "" if part.quoted else "".join(one.text for one in pieces)
                if not part.quoted:
                    pieces = [piece for one in pieces for piece in _split_text(one)]
                if spaces[:1].isspace():
                    open_field = False
                for place, piece in enumerate(pieces):
                    if place:
                        open_field = False
                    add(piece)
                if spaces[-1:].isspace():
                    open_field = False
            else:
                add(self._part(part))
        return [Text("".join(one.text for one in field), _missing(field)) for field in fields]

    def _lookup(self, variable: Variable) -> _Value:
        name = variable.name
        value = self.values.get(name)
        if variable.operator == "other" or (variable.index not in (None, "@", "*") and value is not None):
            value = self._indexed(variable, value)
        elif isinstance(value, list) and variable.index is None:
            # As a shell does: the name of an array alone is its first element.
            value = value[0] if value else Text("")
        if variable.operator in (":-", "-", ":=", "="):
            empty = value is None or (variable.operator.startswith(":") and _is_empty(value))
            if empty and variable.alternative is not None:
                value = self._one(variable.alternative)
                if variable.operator.endswith("="):
                    self._assigned.setdefault(name, variable.alternative.line)
                    self.values[name] = value
        elif variable.operator in (":+", "+"):
            empty = value is None or (variable.operator == ":+" and _is_empty(value))
            value = Text("") if empty or variable.alternative is None else self._one(variable.alternative)
        if value is None:
            return Text(f"${name}", (name,))
        return value

    def _indexed(self, variable: Variable, value: _Value | None) -> Text:
        shown = variable.name if variable.index is None else f"{variable.name}[{variable.index}]"
        if isinstance(value, list) and variable.operator != "other" and (variable.index or "").isdigit():
            place = int(variable.index or 0)
            return value[place] if place < len(value) else Text("")
        return Text(f"${{{shown}}}", (shown,))

    def _arithmetic(self, part: Arithmetic) -> Text:
        missing: list[str] = []

        def value_of(name: str) -> str:
            found = self.values.get(name)
            text = found if isinstance(found, Text) else Text(f"${name}", (name,))
            missing.extend(text.missing)
            return text.text

        expression = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: value_of(match[1]) or "0", part.text)
        number = None if missing else whole_number(expression)
        if number is None:
            return Text(f"$(({part.text}))", tuple(missing) or (f"the value of $(({part.text[:60]}))",))
        return Text(str(number))

    # -- what is missing ----------------------------------------------------------------------------------------

    def explain(self, name: str) -> str:
        """Why the value of ``name`` is unknown, in words."""
        if not re.fullmatch(r"\w+|[@*#?$!-]", name):
            return name
        path = self._circle(name)
        if path:
            raise ConfigurationError(
                f"{self.where}: variables need each other: {' needs '.join('$' + one for one in path)}; give one of "
                f"them with --set {path[0]}=VALUE"
            )
        if name in self._assigned:
            return f"${name} (used before line {self._assigned[name]}, which sets it)"
        if name.isdigit() or name in "@*":
            return f"${name} {_ABSENT[1]}"
        return f"${name} {_ABSENT[0]}"

    def _circle(self, name: str) -> list[str]:
        """Names from ``name`` back to itself, each of which needs the next one; empty: there is no such way."""
        paths = [[name]]
        seen = set()
        while paths:
            path = paths.pop()
            for following in sorted(self._needs.get(path[-1], ())):
                if following == name:
                    return [*path, name]
                if following not in seen and following in self._needs:
                    seen.add(following)
                    paths.append([*path, following])
        return []


def _assignments(statement: Statement) -> Iterator[Assignment]:
    if isinstance(statement, Simple):
        yield from statement.assignments if not statement.words or _declares(statement) else ()
    for inner in _inner(statement):
        yield from _assignments(inner)
    if isinstance(statement, Other):
        for name in statement.names:
            yield Assignment(name, False, Word((), statement.line), statement.line)


def _commands(statement: Statement) -> Iterator[Simple]:
    if isinstance(statement, Simple) and statement.words and not _declares(statement):
        yield statement
    for inner in _inner(statement):
        yield from _commands(inner)


def _declares(statement: Simple) -> bool:
    return bool(statement.words) and statement.words[0].plain in (
        "export",
        "declare",
        "local",
        "readonly",
        "typeset",
    )


def _inner(statement: Statement) -> list[Statement]:
    if isinstance(statement, Chain):
        return [member for _, member in statement.members]
    if isinstance(statement, If):
        return [body for _, body in statement.branches]
    if isinstance(statement, Case):
        return [body for _, body in statement.branches]
    return [statement.body] if isinstance(statement, Other) else []


def _split(words: Sequence[Text], operator: str) -> list[list[Text]]:
    found: list[list[Text]] = [[]]
    for word in words:
        if word.text == operator:
            found.append([])
        else:
            found[-1].append(word)
    return found


def _simple_test(words: Sequence[Text]) -> bool | None:
    """``-z word``, ``-n word``, ``word``, ``a == b`` and comparisons of whole numbers; None for all others."""
    texts = [word.text for word in words]
    unknown = any(word.missing for word in words)
    if len(words) == 2 and texts[0] in ("-z", "-n"):
        # A variable that the file does not set is empty, unless the environment has it.
        return None if unknown else (not texts[1]) == (texts[0] == "-z")
    if unknown:
        return None
    if len(words) == 1:
        return bool(texts[0])
    if len(words) == 3 and texts[1] in ("=", "=="):
        return fnmatch.fnmatchcase(texts[0], texts[2])
    if len(words) == 3 and texts[1] == "!=":
        return not fnmatch.fnmatchcase(texts[0], texts[2])
    if len(words) == 3 and texts[1] in _NUMBER_TESTS:
        left, right = whole_number(texts[0]), whole_number(texts[2])
        if left is None or right is None:
            return None
        return {
            "==": left == right,
            "!=": left != right,
            "<": left < right,
            "<=": left <= right,
            ">": left > right,
            ">=": left >= right,
        }[_NUMBER_TESTS[texts[1]]]
    return None


def _split_text(text: Text) -> list[Text]:
    """Fields of an unquoted value, each with the names that are missing in it."""
    if not text.missing:
        return [Text(piece) for piece in text.text.split()]
    if text.text.startswith("$(") and len(text.missing) == 1:
        return [text]
    found = []
    for piece in text.text.split():
        own = tuple(one for one in text.missing if f"${one.partition(' ')[0]}" in piece)
        found.append(Text(piece, own or (text.missing if "$" in piece else ())))
    return found


def _is_array(variable: Variable) -> bool:
    """Whether it stands for as many words as it has elements, inside quotation marks as well."""
    return variable.index == "@" or (variable.index is None and variable.name == "@")


def is_absent(reason: str) -> bool:
    """Whether a value is unknown because nothing in the file gives one: where no one else does, it is empty."""
    return reason.endswith(_ABSENT)


def _missing(texts: Iterable[Text]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for one in texts for name in one.missing))


def _is_empty(value: _Value | None) -> bool:
    return value is None or (not value if isinstance(value, list) else not value.text)


def _appended(old: _Value | None, more: _Value) -> _Value:
    if isinstance(more, list):
        return [*(old if isinstance(old, list) else [] if old is None else [old]), *more]
    if isinstance(old, list):
        return [*old, more]
    if old is None:
        return more
    return Text(old.text + more.text, _missing((old, more)))


def commands_of(text: str, where: str, given: Mapping[str, str]) -> tuple[list[Command], Explain]:
    """Every command of a script with its words expanded, and what explains names without a value.

    Args:
        given: variables whose values the user gave; what the script assigns to them does not count.

    Raises:
        ConfigurationError: see :func:`drivetrain.config.importing.shell_syntax.parse_script`; or values are endless.
    """
    script = _Script(where, given)
    script.run(parse_script(text, where))
    return script.commands, script.explain
