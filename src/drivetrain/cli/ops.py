"""``drivetrain ops``: the operators with their backends, each graded against float64; ``ops_tune`` chooses."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drivetrain.cli.environment import require_packages
from drivetrain.cli.ops_tune import TUNE_HELP, TUNED_HELP, tune, tuned
from drivetrain.cli.output import show_document
from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.engine.ops.operator import Backend, Operator

__all__ = ["register"]

_HELP = "What a model computes: operators, who computes them, and whether it is right."

_CHECK_HELP = """Grade backends against float64: every output and gradient of every case of the numerics grid.

A backend may be off by a few times what the plain form is off by in the same dtype. It must not write into what it is
given, leave memory unwritten, or give other bits the second time. Exit code 1 where one is wrong.

\b
Example:
  drivetrain ops check rms_norm rotary --backend inductor --dtype bf16
"""

_WRONG = 1

_Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]…", help="Only these operators.")]
_AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    ops = typer.Typer(no_args_is_help=True, help=_HELP, rich_markup_mode=None)
    ops.command("list")(list_operators)
    ops.command("check", help=_CHECK_HELP)(check)
    ops.command("tune", help=TUNE_HELP)(tune)
    ops.command("tuned", help=TUNED_HELP)(tuned)
    app.add_typer(ops, name="ops")


def list_operators(names: _Names = None, json: _AsJson = False) -> None:
    """The operators, their equations and backends; what was never run on a device says so.

    Example: drivetrain ops list attention
    """
    require_packages("torch")
    found = _named(names)
    if json:
        show_document({"operators": [_operator_document(one) for one in found]})
        return
    for one in found:
        typer.echo(f"{one.name:<22} {one.equation}")
        for backend in one.backends:
            typer.echo(f"  {backend.name:<20} {_seen_on(backend)}{_of_library(backend)}")


def check(
    names: _Names = None,
    backend: Annotated[
        list[str] | None, typer.Option("--backend", help="Only this backend; may be given again.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="fp32, bf16 or fp16; may be given again.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    json: _AsJson = False,
) -> None:
    require_packages("torch")
    from drivetrain.engine.ops.grid import DTYPES, graded

    found = _named(names)
    _refuse_unknown_backends(found, backend or ())
    rows = list(graded(found, backend or (), dtype or list(DTYPES), device, progress=_progress))
    wrong = [row for row in rows if row["problems"]]
    if json:
        show_document({"device": device, "graded": rows, "wrong": len(wrong)})
    else:
        _show(rows)
    if wrong:
        raise typer.Exit(_WRONG)


def _progress(said: str) -> None:
    print(said, file=sys.stderr, flush=True)


def _named(names: Sequence[str] | None) -> "tuple[Operator, ...]":
    from drivetrain.engine.ops.discovery import operator_named, operators

    return tuple(operator_named(name) for name in names) if names else operators()


def _seen_on(backend: "Backend") -> str:
    return f"ran on {', '.join(backend.ran_on)}" if backend.ran_on else "never run on a device it is for"


def _of_library(backend: "Backend") -> str:
    return f"; {backend.library}" if backend.library else ""


def _operator_document(one: "Operator") -> dict[str, Any]:
    return {
        "name": one.name,
        "equation": one.equation,
        "source": one.source,
        "error_factor": one.factor,
        "backends": [
            {
                "name": backend.name,
                "library": backend.library or "torch",
                "ran_on": list(backend.ran_on),
                "deterministic": backend.deterministic,
            }
            for backend in one.backends
        ],
    }


def _refuse_unknown_backends(found: "Sequence[Operator]", asked: Sequence[str]) -> None:
    known = list(dict.fromkeys(backend.name for one in found for backend in one.backends))
    for name in asked:
        if name not in known:
            raise DrivetrainError(
                f"--backend {name}: there is no such backend; there are: {', '.join(known)}"
            )


def _show(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        who = f"{row['operator']:<22} {row['backend']:<20} {row['dtype']}"
        worst, problems = row["worst"], row["problems"]
        if not row["cases"]:
            reasons = dict.fromkeys(row["refused"].values())
            typer.echo(f"{who}  not graded: {next(iter(reasons), 'no case has this dtype')}")
            continue
        aside = f", {len(row['refused'])} refused" if row["refused"] else ""
        figure = "" if worst is None else _nearest(worst)
        typer.echo(f"{who}  {'WRONG' if problems else 'right'} in {row['cases']} cases{aside}{figure}")
        for problem in problems:
            typer.echo(f"    {problem}")


def _nearest(worst: dict[str, Any]) -> str:
    figures = f"{worst['error']:.1e} of {worst['allowed']:.1e}"
    return f"; nearest to its bound: {worst['what']} in {worst['case']}, {figures}"
