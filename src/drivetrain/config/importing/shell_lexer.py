"""The text of a shell script as tokens: words with their quotations and variables, assignments, operators."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.config.importing.shell_tree import (
    Arithmetic,
    Assignment,
    Literal,
    Part,
    Substitution,
    Variable,
    Word,
)
from drivetrain.errors import ConfigurationError

__all__ = ["DEEPEST", "Lexer", "Token"]

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_SPECIAL = "@*#?$!-0123456789"
_OPERATORS = (
    "&&",
    "||",
    ";;",
    "&>>",
    "&>",
    "|&",
    ";",
    "&",
    "|",
    "(",
    ")",
    "<<<",
    "<<-",
    "<<",
    ">>",
    ">|",
    ">&",
    "<&",
    "<",
    ">",
)
_LONGEST_FIRST = tuple(sorted(_OPERATORS, key=len, reverse=True))
_ENDS_WORD = " \t\r\n;&|()<>"
"""White space, and what operators begin with."""
DEEPEST = 40
"""How deep variables and statements may be nested."""


@dataclass(frozen=True)
class Token:
    kind: str
    """``word``, ``operator`` or ``end``."""
    text: str
    line: int
    word: Word | None = None
    assignment: Assignment | None = None


class Lexer:
    """Cuts text into tokens; newlines are operators."""

    def __init__(self, text: str, where: str, line: int = 1, depth: int = 0) -> None:
        self._text = text
        self._where = where
        self._at = 0
        self._line = line
        self._depth = depth
        self._here: list[tuple[str, bool]] = []

    def fail(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"{self._where}, line {self._line}: {what}")

    def _peek(self, count: int = 1) -> str:
        return self._text[self._at : self._at + count]

    def tokens(self) -> list[Token]:
        found = []
        while (token := self._next()) is not None:
            found.append(token)
        found.append(Token("end", "the end of the file", self._line))
        return found

    def _next(self) -> Token | None:
        while self._at < len(self._text):
            char = self._peek()
            if char == "\\" and self._peek(2) in ("\\\n", "\\\r"):
                self._at += 3 if self._peek(3) == "\\\r\n" else 2
                self._line += 1
            elif char in " \t\r":
                self._at += 1
            elif char == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif char == "\n":
                token = Token("operator", "\n", self._line)
                self._at += 1
                self._line += 1
                self._skip_here_documents()
                return token
            else:
                return self._operator() or self._word_token()
        return None

    def _skip_here_documents(self) -> None:
        for delimiter, tabs in self._here:
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._at = min(end + 1, len(self._text))
                self._line += 1
                if (line.lstrip("\t") if tabs else line).rstrip("\r") == delimiter:
                    break
        self._here.clear()

    def _operator(self) -> Token | None:
        rest = self._peek(3)
        found = next((one for one in _LONGEST_FIRST if rest.startswith(one)), None)
        if found is None:
            return None
        token = Token("operator", found, self._line)
        self._at += len(found)
        if found in ("<<", "<<-"):
            while self._peek() in (" ", "\t"):
                self._at += 1
            word = self._word()
            self._here.append((word.plain or "", found == "<<-"))
            return self._next()
        return token

    def _word_token(self) -> Token:
        line = self._line
        match = _ASSIGNMENT.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            value: Word | tuple[Word, ...]
            if self._peek() == "(":
                self._at += 1
                value = self._array()
            else:
                value = self._word()
            assignment = Assignment(match[1], bool(match[2]), value, line)
            shown = (Literal(match[0], False), *(value.parts if isinstance(value, Word) else ()))
            return Token("word", match[0], line, Word(shown, line), assignment)
        word = self._word()
        if self._peek() in ("<", ">") and (word.keyword or "").isdigit():
            # The number of a file that is redirected, as in 2>&1.
            return self._operator() or self._word_token()
        if not word.parts:
            raise self.fail(f"{self._peek()!r} is not understood here")
        return Token("word", word.plain or "", line, word)

    def _array(self) -> tuple[Word, ...]:
        words: list[Word] = []
        while True:
            token = self._next()
            if token is None:
                raise self.fail("an array of values is not closed, ) is missing")
            if token.kind == "operator" and token.text == ")":
                return tuple(words)
            if token.kind == "operator" and token.text == "\n":
                continue
            if token.word is None:
                raise self.fail(f"{token.text!r} in an array of values")
            words.append(token.word)

    def _word(self, stop: str = "") -> Word:
        """Up to white space or an operator; with ``stop`` up to that character alone."""
        parts: list[Part] = []
        line = self._line
        while self._at < len(self._text):
            char = self._peek()
            if stop and char == stop:
                break
            if not stop and char in _ENDS_WORD:
                break
            if char == "\n":
                self._line += 1
            if char == "\\":
                following = self._text[self._at + 1 : self._at + 2]
                self._at += 2
                if following == "\n":
                    self._line += 1
                elif following == "\r":
                    self._at += self._peek() == "\n"
                    self._line += 1
                else:
                    parts.append(Literal(following, True))
            elif char == "'":
                parts.append(self._single())
            elif char == '"':
                parts.extend(self._double())
            elif char in "$`":
                parts.append(self._expansion(quoted=False))
            else:
                parts.append(Literal(char, False))
                self._at += 1
        return Word(_joined(parts), line)

    def _single(self) -> Literal:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise self.fail("a quotation that begins with ' is not closed")
        text = self._text[self._at + 1 : end]
        self._line += text.count("\n")
        self._at = end + 1
        return Literal(text, True)

    def _double(self) -> list[Part]:
        parts: list[Part] = [Literal("", True)]
        began = self._line
        self._at += 1
        while True:
            char = self._peek()
            if not char:
                self._line = began
                raise self.fail('a quotation that begins with " is not closed')
            if char == '"':
                self._at += 1
                return parts
            if char == "\\":
                following = self._text[self._at + 1 : self._at + 2]
                self._at += 2
                if following == "\n":
                    self._line += 1
                else:
                    parts.append(Literal(following if following in '$`"\\' else "\\" + following, True))
            elif char in "$`":
                parts.append(self._expansion(quoted=True))
            else:
                self._line += char == "\n"
                parts.append(Literal(char, True))
                self._at += 1

    def _expansion(self, *, quoted: bool) -> Part:
        if self._peek() == "`":
            end = self._text.find("`", self._at + 1)
            if end < 0:
                raise self.fail("a command between backquotes is not closed")
            text = self._text[self._at + 1 : end]
            self._line += text.count("\n")
            self._at = end + 1
            return Substitution(text, quoted)
        if self._peek(3) == "$((":
            return Arithmetic(self._between(3, "(", ")", 2), quoted)
        if self._peek(2) == "$(":
            return Substitution(self._between(2, "(", ")", 1), quoted)
        if self._peek(2) == "${":
            line = self._line
            return self._braces(self._between(2, "{", "}", 1), line, quoted)
        if self._peek(2) == "$'":
            self._at += 1
            return self._single()
        match = _NAME.match(self._text, self._at + 1)
        if match is not None:
            self._at = match.end()
            return Variable(match[0], None, "", None, quoted)
        following = self._text[self._at + 1 : self._at + 2]
        if following and following in _SPECIAL:
            self._at += 2
            return Variable(following, None, "", None, quoted)
        self._at += 1
        return Literal("$", quoted)

    def _between(self, opening: int, left: str, right: str, depth: int) -> str:
        """What stands up to the bracket that closes; quotations inside are passed over."""
        began, line = self._at, self._line
        self._at += opening
        start, whole, quote = self._at, depth, ""
        while self._at < len(self._text):
            char = self._peek()
            self._line += char == "\n"
            if char == "\\":
                self._at += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char == left:
                depth += 1
            elif char == right:
                depth -= 1
                if depth == 0:
                    text = self._text[start : self._at - (whole - 1)]
                    self._at += 1
                    return text
            self._at += 1
        self._line, self._at = line, began
        raise self.fail(f"{self._text[began : began + opening]} is not closed")

    def _braces(self, text: str, line: int, quoted: bool) -> Variable:
        match = re.match(r"([A-Za-z_]\w*|[@*#?$!-]|\d+)(?:\[([^\]]*)\])?", text)
        if match is None:
            return Variable(text, None, "other", None, quoted)
        rest = text[match.end() :]
        operator = next(
            (one for one in (":-", ":=", ":+", ":?", "-", "=", "+", "?") if rest.startswith(one)), ""
        )
        if rest and not operator:
            return Variable(match[1], match[2], "other", None, quoted)
        alternative = None
        if operator:
            if self._depth >= DEEPEST:
                raise self.fail(f"variables are nested more than {DEEPEST} deep")
            inner = Lexer(rest[len(operator) :] + "\0", self._where, line, self._depth + 1)
            alternative = inner._word(stop="\0")
            if quoted:
                alternative = Word(tuple(_quoted(part) for part in alternative.parts), line)
        return Variable(match[1], match[2], operator, alternative, quoted)


def _quoted(part: Part) -> Part:
    if isinstance(part, Literal):
        return Literal(part.text, True)
    if isinstance(part, Variable):
        return Variable(part.name, part.index, part.operator, part.alternative, True)
    return type(part)(part.text, True)


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """With neighbouring characters in one part."""
    found: list[Part] = []
    run: list[str] = []
    kind = False
    for part in parts:
        if isinstance(part, Literal):
            if run and part.quoted != kind:
                found.append(Literal("".join(run), kind))
                run = []
            kind = part.quoted
            run.append(part.text)
            continue
        if run:
            found.append(Literal("".join(run), kind))
            run = []
        found.append(part)
    if run:
        found.append(Literal("".join(run), kind))
    return tuple(found)
