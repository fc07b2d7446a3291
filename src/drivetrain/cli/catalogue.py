"""``drivetrain catalogue``: the optimisations there are, and all that is known of one."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from drivetrain.catalogue import Knob, Optimisation

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("catalogue")(catalogue)


def catalogue(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Only this one, with everything about it.")
    ] = None,
    scores: Annotated[
        str | None,
        typer.Option(
            "--scores",
            metavar="TUNES_DIR",
            help="How far predictions were from the trials of all tunes in a folder.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """The optimisations: what requests them, what they may do to the numbers, what time they can save.

    Example: drivetrain catalogue compile

    Example: drivetrain catalogue --scores tunes
    """
    from drivetrain.catalogue import catalogue, entry
    from drivetrain.cli.output import show_document

    if scores is not None:
        _show_scores(scores, name, as_json=json)
        return
    entries = catalogue() if name is None else (entry(name),)
    if json:
        show_document({"optimisations": [one.to_document() for one in entries]})
    elif name is None:
        _list(entries)
    else:
        _show(entries[0])


def _list(entries: "tuple[Optimisation, ...]") -> None:
    for one in entries:
        typer.echo(f"{one.name:<14} {one.field:<24} {one.numerics:<12} {one.summary}")
        typer.echo(f"{'':<14} treats {', '.join(one.treats)}")


def _show(one: "Optimisation") -> None:
    typer.echo(f"{one.name}: {one.summary}")
    for label, text in (
        ("field", one.field),
        ("numerics", one.numerics),
        ("treats", ", ".join(one.treats)),
        ("relieves", ", ".join(one.relieves) or "no category of memory"),
        ("knobs", "; ".join(map(_knob, one.knobs)) or "none"),
        (
            "moves",
            "; ".join(f"{move.name} ({move.numerics}): {move.summary}" for move in one.moves) or "none",
        ),
        ("requires", " ".join(rule.doc for rule in one.requires) or "nothing of other fields"),
        ("excludes", ", ".join(one.conflicts) or "none"),
        ("capability", one.capability or "none"),
        ("evidence", one.evidence_rule),
        (
            "expected gain",
            f"none is predicted: {one.no_prediction}" if one.time_model is None else one.time_model.rule,
        ),
        ("sources", "; ".join(one.sources)),
    ):
        typer.echo(f"  {label:<14} {text}")


def _show_scores(folder: str, name: str | None, *, as_json: bool) -> None:
    from drivetrain.catalogue import entry
    from drivetrain.cli.output import show_document
    from drivetrain.report.ladder_rows import prediction_in_words
    from drivetrain.tune.prediction_score import ERROR_RULE, score_folder

    found = score_folder(folder)
    if name is not None:
        found = found.of_entry(entry(name).name)
    for why in found.passed_over:
        print(f"passed over: {why}", file=sys.stderr)
    if as_json:
        show_document(found.to_document())
        return
    whole = prediction_in_words(found.whole.to_document())
    typer.echo(f"{found.tunes} tunes in {folder}: {whole or 'no step was measured'}")
    for entry_name, score in found.entries.items():
        words = prediction_in_words(score.to_document()) or "no step was measured"
        typer.echo(f"  {entry_name:<28} {words}")
    typer.echo(f"error: {ERROR_RULE}")


def _knob(knob: "Knob") -> str:
    return f"{knob.field} from {knob.low:g} to {knob.high:g}{' (whole numbers)' if knob.whole else ''}"
