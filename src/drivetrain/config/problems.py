"""What is wrong with a field, in plain words: pydantic's errors as one line each.

Each line names the field by its dotted path, shows what was given and gives the nearest legal value.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from drivetrain.config.leaves import Leaf, leaves, section_types
from drivetrain.config.suggest import nearest, nearest_leaf

__all__ = ["describe", "shown", "unknown_field"]

_SIGNS: Mapping[str, tuple[str, str]] = {
    "greater_than_equal": ("ge", ">="),
    "greater_than": ("gt", ">"),
    "less_than_equal": ("le", "<="),
    "less_than": ("lt", "<"),
}


def describe(error: ValidationError, origin: Callable[[str], str]) -> list[str]:
    """One line for each error. ``origin`` maps a dotted path to words such as ``" (in run.toml)"``."""
    lines = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"])
        lines.append(f"{path}{origin(path)}: {_what(item, path)}")
    return lines


def shown(value: Any) -> str:
    """A value as a user would write it, at most about 60 characters."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    text = repr(value) if isinstance(value, str | int | float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def unknown_field(section: str | None, name: str) -> str:
    """What to say about ``section.name`` (or a bare top-level ``name``) that is no leaf."""
    known = section_types()
    if section is None:
        problem = "no such section"
        alike = nearest(name, known)
        match = nearest_leaf(None, name)
        if alike and (match is None or match.partition(".")[2] != name):
            match = f"[{alike}]"
    else:
        problem = "no such field" if section in known else f"no section is called {shown(section)}"
        match = nearest_leaf(section, name)
    if match is not None:
        return f"{problem}; did you mean {match}?"
    if section in known:
        fields = ", ".join(leaf.name for leaf in leaves().values() if leaf.section == section)
        return f"{problem}; the fields of {section} are {fields}"
    return f"{problem}; the sections are {', '.join(known)}"


def _what(item: ErrorDetails, path: str) -> str:
    leaf = leaves().get(path)
    if leaf is not None:
        return _wrong_value(item, leaf)
    if item["type"] == "extra_forbidden":
        section, name = item["loc"][:-1], str(item["loc"][-1])
        return unknown_field(str(section[0]) if section else None, name)
    if item["type"] in ("model_type", "model_attributes_type"):
        return f"expected a section ([{path}] with its fields below), got {shown(item['input'])}"
    return item["msg"]


def _wrong_value(item: ErrorDetails, leaf: Leaf) -> str:
    kind, value = item["type"], item["input"]
    if kind == "missing":
        return f"required ({leaf.help.rstrip('.')}); give it, or start from a preset"
    if kind in _SIGNS:
        attribute, sign = _SIGNS[kind]
        return _out_of_range(leaf, value, sign, item["ctx"][attribute])
    if kind == "literal_error":
        match = nearest(value, leaf.choices) if isinstance(value, str) else None
        hint = f"; did you mean {match}?" if match else ""
        return f"expected {leaf.expectation}, got {shown(value)}{hint}"
    if kind == "string_pattern_mismatch":
        examples = f" such as {leaf.examples[0]}" if leaf.examples else ""
        return f"expected text of the form {leaf.pattern}{examples}, got {shown(value)}"
    if kind == "string_too_short":
        return "must not be empty" + ("; for no value write none" if leaf.optional else "")
    if kind == "finite_number":
        return f"expected a finite number, got {shown(value)}"
    if kind == "string_unicode":
        return "expected text in valid Unicode"
    if kind == "float_type" and isinstance(value, int) and not isinstance(value, bool):
        return f"{shown(value)} is too large"
    return f"expected {leaf.expectation}, got {shown(value)}"


def _out_of_range(leaf: Leaf, value: Any, sign: str, limit: int | float) -> str:
    problem = f"got {shown(value)}, must be {sign} {limit:g}" if isinstance(limit, float) else None
    problem = problem or f"got {shown(value)}, must be {sign} {limit}"
    if sign in (">=", "<="):
        return f"{problem}; the nearest legal value is {limit}"
    return problem if leaf.default is None else f"{problem}; the default is {shown(leaf.default)}"
