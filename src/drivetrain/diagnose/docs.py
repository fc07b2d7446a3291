"""``docs/diagnosis.md``: the page on the causes, generated from their list, the rules and the catalogue.

``python -m drivetrain.diagnose.docs`` writes it; a test keeps it fresh.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from drivetrain.catalogue import catalogue
from drivetrain.diagnose.causes import CAUSES, SEARCH
from drivetrain.diagnose.facts import NEEDS
from drivetrain.diagnose.remedies import entries_for
from drivetrain.diagnose.rule import rules
from drivetrain.diagnose.rules.account_classes import CAUSE_OF_CLASS

__all__ = ["PATH", "render"]

PATH = Path("docs") / "diagnosis.md"
"""Where the page lies in the repository."""

_INTRODUCTION = """\
# Causes

This page is generated from `diagnose/causes.py`, the rules and the catalogue: `python -m drivetrain.diagnose.docs`
writes it. How a diagnosis is made, and what each key of a finding means, is in [diagnose](diagnose.md).

Every finding of `drivetrain diagnose` has a `cause`, one of the identifiers below. They are grouped by the order in
which an expert searches where MFU stays low: {order}.

Each has the symptom by which somebody meets it who does not know the cause, what happens, how its cost comes about, the
rule that finds it and what that rule needs, and what helps: entries of the [catalogue](catalogue.md), those that name
the cause, else those that treat its class; then what a person can do.

A rule that lacks what it needs is not asked: the diagnosis lists it under `not_asked` with the reason. What a need
takes:

{needs}
"""


def render() -> str:
    """The text of the page."""
    order = ", ".join(f"{number} {title}" for number, (_, title) in enumerate(SEARCH, start=1))
    needs = "\n".join(f"* *{need}*: {what}." for need, what in NEEDS.items())
    parts = [_INTRODUCTION.format(order=order, needs=needs)]
    for area, title in SEARCH:
        parts.append(f"## {title[0].upper()}{title[1:]}\n")
        for name, cause in CAUSES.items():
            if cause.area == area:
                parts.append("\n".join(_section(name)))
    return "\n".join(parts)


def _section(name: str) -> Iterator[str]:
    cause = CAUSES[name]
    found = [rule for rule in rules() if name in rule.causes]
    by = "; ".join(
        f"`{rule.name}`" + (f" (needs {', '.join(rule.needs)})" if rule.needs else "") for rule in found
    )
    yield f"### `{name}`\n"
    yield f"{cause.meaning[0].upper()}{cause.meaning[1:]}.\n"
    yield f"* Symptom: {cause.symptom}."
    yield f"* Cost: {cause.cost}."
    yield f"* Found by {by}."
    helps = remedies_of(name)
    yield f"* Helps: {', '.join(f'`{one}`' for one in helps) + '; else ' if helps else ''}{cause.advice}.\n"


def remedies_of(name: str) -> tuple[str, ...]:
    """Entries of the catalogue against a cause: those that name it, else those that treat its classes."""
    named = tuple(one.name for one in catalogue() if name in one.cures)
    classes = [start for start, cause, _ in CAUSE_OF_CLASS if cause == name]
    return named or tuple(one.name for one in entries_for(classes))


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PATH
    path.write_text(render(), encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)
