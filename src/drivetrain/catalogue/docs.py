"""``docs/catalogue.md``: the page on the optimisations, generated from the entries.

``python -m drivetrain.catalogue.docs`` writes it; a test keeps it fresh.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from drivetrain.catalogue.discovery import catalogue
from drivetrain.catalogue.entry import Knob, Optimisation

__all__ = ["PATH", "render"]

PATH = Path("docs") / "catalogue.md"
"""Where the page lies in the repository."""

_INTRODUCTION = """\
# Optimisations

This page is generated from the catalogue: `python -m drivetrain.catalogue.docs` writes it. `drivetrain catalogue` shows
the same at the terminal.

Each optimisation is requested by one field of the configuration. A request that cannot take effect stops nothing: the
run goes on without it, warns, and says so in its record and in the findings of its summary. The record of a run
(`events.jsonl`, `summary.json`, `train --json`) holds for each optimisation whether it was requested, whether it is
active, and the reason where it is not; a default that can have no effect here is not counted as a request. After a
profiled window it holds the evidence: *shown*, *absent*, or *unknown* where the trace lacks the records that tell.

**Numerics** says what the optimisation may do to the numbers, and so which gate it must pass: *exact*, the same bits;
*round-off*, another order or rounding of the same arithmetic; *statistical*, another arithmetic, whose training must be
as good. **Treats** are the classes of the account (`docs/account.md`) whose time it can reduce.

**Expected gain** is the model by which a gain is predicted from the account of a profiled run before it is tried, or
why there is none; how far predictions were from trials, `drivetrain catalogue --scores TUNES` says
([tune.md](tune.md#predictions)).
"""


def render() -> str:
    """The text of the page."""
    table = [
        "| optimisation | field | numerics | treats |",
        "|---|---|---|---|",
        *(
            f"| [`{one.name}`](#{one.name}) | `{one.field}` | {one.numerics} | {_names(one.treats) or '–'} |"
            for one in catalogue()
        ),
    ]
    return "\n".join([_INTRODUCTION, *table, "", *("\n".join(_section(one)) for one in catalogue())])


def _section(one: Optimisation) -> Iterator[str]:
    yield f"## {one.name}\n"
    yield f"{one.summary[0].upper()}{one.summary[1:]}.\n"
    yield f"* Requested by `{one.field}`."
    yield f"* Numerics: {one.numerics}."
    yield f"* Treats {_names(one.treats) or 'no class: what it gives is memory'}."
    if one.cures:
        yield f"* Cures {_names(one.cures)} (`docs/diagnosis.md`)."
    if one.relieves:
        yield f"* Makes {_names(one.relieves)} smaller (`docs/memory.md`)."
    yield f"* Knobs: {'; '.join(map(_knob, one.knobs)) or 'none'}."
    for first, second in one.interacts_with:
        yield f"* `{first}` and `{second}` are searched together where both are searched."
    for move in one.moves:
        yield (
            f"* Move `{move.name}`: {move.summary}. Numerics: {move.numerics}. Treats {_names(move.treats)}. May "
            f"change {_names(tuple(sorted(move.leaves)))}."
        )
    if one.requires:
        yield f"* Requires: {' '.join(rule.doc for rule in one.requires)}"
    if one.conflicts:
        yield f"* Excludes {_names(one.conflicts)}."
    if one.capability is not None:
        yield f"* Needs the capability `{one.capability}` (`drivetrain doctor`)."
    yield f"* Evidence: {one.evidence_rule}."
    if one.time_model is not None:
        yield f"* Expected gain: {one.time_model.rule}."
    else:
        yield f"* Expected gain: none is predicted: {one.no_prediction}."
    yield f"* Sources: {'; '.join(one.sources)}.\n"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _knob(knob: Knob) -> str:
    kind = "whole numbers" if knob.whole else "numbers"
    scale = f"on a {knob.scale} scale" if knob.values is None else "as many of them as are legal"
    treats = "" if knob.treats is None else f" (treats {_names(knob.treats)})"
    return f"`{knob.field}`, {kind} from {knob.low:g} to {knob.high:g} {scale}{treats}"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PATH
    path.write_text(render(), encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)
