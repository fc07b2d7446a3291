"""The schema seen as a flat list of leaves: name, type, range, default and help of each field.

The loader's messages, the documentation, the serialiser and the tests all read the schema through
this one view, so that they can't disagree about it.
"""

import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from drivetrain.config.base import Section
from drivetrain.config.schema import RunConfig

__all__ = ["Kind", "Leaf", "leaf_values", "leaves", "section_types"]

Kind = Literal["whole number", "number", "true or false", "text", "choice"]

_KINDS: Mapping[object, Kind] = types.MappingProxyType(
    {bool: "true or false", int: "whole number", float: "number", str: "text"}
)


@dataclass(frozen=True)
class Leaf:
    """One field of one section.

    Attributes:
        section, name: the two parts of its dotted path.
        kind: what its values are.
        choices: the legal values of a choice, in the schema's order.
        optional: whether it may be absent (``none`` in an override).
        required: whether it has no default.
        default: the default; None as well when required.
        bounds: the range as pairs such as ``(">=", 1)``.
        pattern: regular expression of a text.
        examples: values of that form.
        help: its docstring.
    """

    section: str
    name: str
    kind: Kind
    choices: tuple[str, ...]
    optional: bool
    required: bool
    default: Any
    bounds: tuple[tuple[str, int | float], ...]
    pattern: str | None
    examples: tuple[str, ...]
    help: str

    @property
    def path(self) -> str:
        """The dotted name, ``section.field``."""
        return f"{self.section}.{self.name}"

    @property
    def expectation(self) -> str:
        """What a value must be, in words that follow "expected"."""
        if self.kind == "choice":
            words = "one of " + ", ".join(self.choices)
        elif self.kind in ("whole number", "number"):
            words = f"a {self.kind}"
        else:
            words = self.kind
        return f"{words}, or none" if self.optional else words


def section_types() -> dict[str, type[Section]]:
    """Name to class of each section, in the schema's order."""
    sections: dict[str, type[Section]] = {}
    for name, field in RunConfig.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, Section)
        sections[name] = field.annotation
    return sections


@functools.cache
def leaves() -> Mapping[str, Leaf]:
    """Dotted path to leaf, in the schema's order."""
    found = [
        _leaf(section, name, field)
        for section, kind in section_types().items()
        for name, field in kind.model_fields.items()
    ]
    return types.MappingProxyType({leaf.path: leaf for leaf in found})


def leaf_values(config: RunConfig) -> Iterator[tuple[Leaf, Any]]:
    """Each leaf with its value in ``config``, in the schema's order."""
    for leaf in leaves().values():
        yield leaf, getattr(getattr(config, leaf.section), leaf.name)


def _leaf(section: str, name: str, field: FieldInfo) -> Leaf:
    inner, optional = _without_none(field.annotation)
    choices: tuple[str, ...] = get_args(inner) if get_origin(inner) is Literal else ()
    return Leaf(
        section=section,
        name=name,
        kind="choice" if choices else _KINDS[inner],
        choices=choices,
        optional=optional,
        required=field.is_required(),
        default=None if field.is_required() else field.default,
        bounds=tuple(_bounds(field)),
        pattern=next((item.pattern for item in field.metadata if getattr(item, "pattern", None)), None),
        examples=tuple(str(example) for example in field.examples or ()),
        help=" ".join((field.description or "").split()),
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """The type without ``| None`` and without ``Annotated``, and whether None was allowed."""
    optional = False
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        assert len(members) == 1, annotation
        optional, annotation = True, members[0]
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation, optional


def _bounds(field: FieldInfo) -> Iterator[tuple[str, int | float]]:
    for item in field.metadata:
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            limit = getattr(item, attribute, None)
            if limit is not None:
                yield sign, limit
