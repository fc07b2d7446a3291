"""The value of an arithmetic expression of whole numbers, worked out without evaluating any code."""

import re

__all__ = ["whole_number"]

_TOKEN = re.compile(r"\s*(?:(\d+)|([-+*/%()]))")
_LONGEST = 1000
_MOST_BITS = 256
_DEEPEST = 50


class _NoNumber(Exception):
    """It is no such expression, or has no value."""


def whole_number(text: str) -> int | None:
    """Value of ``text``: whole numbers, ``+ - * / %`` and brackets, division towards zero as in C.

    Returns:
        None where it is anything else, divides by zero, or is larger than any size.
    """
    if len(text) > _LONGEST:
        return None
    tokens = []
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            return None
        tokens.append(match[1] or match[2])
        at = match.end()
    try:
        parser = _Expression(tokens)
        value = parser.sum(0)
        return None if parser.rest else value
    except _NoNumber:
        return None


class _Expression:
    def __init__(self, tokens: list[str]) -> None:
        self.rest = tokens

    def sum(self, depth: int) -> int:
        value = self._product(depth)
        while self.rest and self.rest[0] in "+-":
            sign = self.rest.pop(0)
            other = self._product(depth)
            value = value + other if sign == "+" else value - other
        return value

    def _product(self, depth: int) -> int:
        value = self._factor(depth)
        while self.rest and self.rest[0] in ("*", "/", "%"):
            sign = self.rest.pop(0)
            other = self._factor(depth)
            if sign == "*":
                value *= other
                if value.bit_length() > _MOST_BITS:
                    raise _NoNumber
                continue
            if other == 0:
                raise _NoNumber
            quotient = abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1)
            value = quotient if sign == "/" else value - quotient * other
        return value

    def _factor(self, depth: int) -> int:
        if not self.rest or depth > _DEEPEST:
            raise _NoNumber
        token = self.rest.pop(0)
        if token in "+-":
            value = self._factor(depth + 1)
            return -value if token == "-" else value
        if token == "(":
            value = self.sum(depth + 1)
            if not self.rest or self.rest.pop(0) != ")":
                raise _NoNumber
            return value
        if not token.isdigit() or len(token) > 80:
            raise _NoNumber
        return int(token)
