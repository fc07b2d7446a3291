"""The text of a shell script as statements, by the part of bash's grammar that launch scripts are written in.

Nothing is expanded and nothing is run here; :mod:`drivetrain.config.importing.shell_values` gives words their values.
"""

import re
from collections.abc import Sequence

from drivetrain.config.importing.shell_lexer import DEEPEST, Lexer, Token
from drivetrain.config.importing.shell_tree import (
    DECLARING,
    Assignment,
    Case,
    Chain,
    If,
    Literal,
    Other,
    Simple,
    Statement,
    Word,
)
from drivetrain.errors import ConfigurationError

__all__ = ["parse_script"]

_REDIRECTIONS = ("&>>", "&>", "<<<", "<<-", "<<", ">>", ">|", ">&", "<&", "<", ">")


class _Parser:
    """Tokens to statements, by recursive descent."""

    def __init__(self, tokens: Sequence[Token], where: str) -> None:
        self._tokens = tokens
        self._where = where
        self._at = 0
        self._depth = 0

    @property
    def _now(self) -> Token:
        return self._tokens[self._at]

    def _fail(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"{self._where}, line {self._now.line}: {what}")

    def _keyword(self) -> str | None:
        word = self._now.word
        return None if word is None or self._now.assignment is not None else word.keyword

    def _expect(self, keyword: str) -> None:
        if self._keyword() != keyword:
            raise self._fail(f"expected {keyword}, found {self._now.text!r}")
        self._at += 1

    def _is_operator(self, *texts: str) -> bool:
        return self._now.kind == "operator" and self._now.text in texts

    def script(self) -> Chain:
        found = self._chain(())
        if self._now.kind != "end":
            raise self._fail(f"{self._now.text!r} is not understood here")
        return found

    def _chain(self, ends: tuple[str, ...], closing: tuple[str, ...] = ()) -> Chain:
        """Statements up to one of the words ``ends`` or operators ``closing``, which is left where it is."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._fail(f"statements are nested more than {DEEPEST} deep")
        members: list[tuple[str, Statement]] = []
        before = ";"
        while True:
            if self._now.kind == "end" or self._is_operator(*closing):
                break
            if self._is_operator("\n", ";", "&", "&&", "||", "|", "|&"):
                text = self._now.text
                if text in ("&&", "||"):
                    before = text
                elif text in ("|", "|&"):
                    before = "|"
                elif before not in ("&&", "||", "|") or text != "\n":
                    before = ";"
                self._at += 1
                continue
            if self._keyword() in ends:
                break
            members.append((before, self._statement()))
            before = ";"
        self._depth -= 1
        return Chain(tuple(members))

    def _statement(self) -> Statement:
        keyword = self._keyword()
        line = self._now.line
        if keyword == "if":
            return self._if(line)
        if keyword == "case":
            return self._case(line)
        if keyword in ("for", "select", "while", "until"):
            return self._loop(keyword, line)
        if keyword == "{":
            self._at += 1
            body = self._chain(("}",))
            self._expect("}")
            return body
        if keyword == "function" or self._is_function():
            return self._function(line)
        if self._is_operator("("):
            self._at += 1
            if self._is_operator("("):
                return self._arithmetic(line)
            body = self._chain((), (")",))
            self._close()
            return body
        return self._simple(line)

    def _close(self) -> None:
        if not self._is_operator(")"):
            raise self._fail(f"expected ), found {self._now.text!r}")
        self._at += 1

    def _arithmetic(self, line: int) -> Other:
        """``((…))``: what it assigns is not worked out, and so unknown behind it."""
        self._at += 1
        names, opened, before = [], 2, ""
        while opened:
            token = self._now
            if token.kind == "end":
                raise self._fail("(( is not closed")
            opened += self._is_operator("(") - self._is_operator(")")
            text = token.word.plain or "" if token.word is not None else ""
            if token.assignment is not None:
                value = token.assignment.value
                if not (isinstance(value, Word) and (value.plain or "").startswith("=")):
                    names.append(token.assignment.name)
            elif re.fullmatch(r"[-+*/%^]?=", text):
                names.append(before)
            names += re.findall(r"(?:\+\+|--)([A-Za-z_]\w*)", text)
            names += re.findall(r"([A-Za-z_]\w*)(?:\+\+|--|[-+*/%^]?=(?!=))", text)
            before = text
            self._at += 1
        return Other("an arithmetic command", tuple(names), Chain(()), line)

    def _if(self, line: int) -> If:
        self._at += 1
        branches: list[tuple[Chain | None, Chain]] = []
        while True:
            condition = self._chain(("then",))
            self._expect("then")
            branches.append((condition, self._chain(("elif", "else", "fi"))))
            keyword = self._keyword()
            if keyword == "elif":
                self._at += 1
                continue
            if keyword == "else":
                self._at += 1
                branches.append((None, self._chain(("fi",))))
            self._expect("fi")
            return If(tuple(branches), line)

    def _case(self, line: int) -> Case:
        self._at += 1
        word = self._take_word()
        self._skip_newlines()
        self._expect("in")
        branches: list[tuple[tuple[Word, ...], Chain]] = []
        while True:
            self._skip_newlines()
            if self._keyword() == "esac":
                self._at += 1
                return Case(word, tuple(branches), line)
            if self._is_operator("("):
                self._at += 1
            patterns = [self._take_word()]
            while self._is_operator("|"):
                self._at += 1
                patterns.append(self._take_word())
            self._close()
            branches.append((tuple(patterns), self._chain(("esac",), (";;",))))
            if self._is_operator(";;"):
                self._at += 1

    def _loop(self, what: str, line: int) -> Other:
        self._at += 1
        names: tuple[str, ...] = ()
        if what in ("for", "select") and self._now.word is not None:
            names = (self._now.word.plain or "",)
        self._chain(("do",))
        self._expect("do")
        body = self._chain(("done",))
        self._expect("done")
        return Other(f"a {what} loop", names, body, line)

    def _is_function(self) -> bool:
        following = [(one.kind, one.text) for one in self._tokens[self._at + 1 : self._at + 3]]
        return self._now.kind == "word" and following == [("operator", "("), ("operator", ")")]

    def _function(self, line: int) -> Other:
        if self._keyword() == "function":
            self._at += 1
        self._take_word()
        while self._is_operator("(", ")", "\n"):
            self._at += 1
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._fail(f"statements are nested more than {DEEPEST} deep")
        body = self._statement()
        self._depth -= 1
        return Other("a function", (), Chain(((";", body),)), line)

    def _take_word(self) -> Word:
        word = self._now.word
        if word is None:
            raise self._fail(f"expected a word, found {self._now.text!r}")
        self._at += 1
        return word

    def _skip_newlines(self) -> None:
        while self._is_operator("\n"):
            self._at += 1

    def _simple(self, line: int) -> Simple:
        assignments: list[Assignment] = []
        words: list[Word] = []
        while True:
            token = self._now
            if token.kind == "word":
                declares = bool(words) and words[0].keyword in DECLARING
                if token.assignment is not None and (not words or declares):
                    assignments.append(token.assignment)
                else:
                    assert token.word is not None
                    words.append(token.word)
                self._at += 1
            elif token.kind == "operator" and token.text != "\n" and _is_open_test(words):
                words.append(Word((Literal(token.text, False),), token.line))
                self._at += 1
            elif self._is_operator(*_REDIRECTIONS):
                self._at += 1
                if self._now.kind == "word":
                    self._at += 1
            elif not words and not assignments:
                raise self._fail(f"{token.text!r} is not understood here")
            else:
                return Simple(tuple(assignments), tuple(words), line)


def _is_open_test(words: Sequence[Word]) -> bool:
    """Whether ``[[`` was read and its ``]]`` was not."""
    return bool(words) and words[0].keyword == "[[" and words[-1].keyword != "]]"


def parse_script(text: str, where: str) -> Chain:
    """The statements of a script.

    Args:
        where: names it in messages.

    Raises:
        ConfigurationError: a bracket or a quotation is not closed, or the text is beyond what is understood here.
    """
    return _Parser(Lexer(text, where).tokens(), where).script()
