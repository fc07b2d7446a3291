"""``drivetrain compare RUN RUN...``: five dimensions side by side, what differs, and the convergence gate."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from drivetrain.cli.output import show_document
from drivetrain.cli.runs import AsJson, RunsDir, print_table
from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from drivetrain.archive.compare import Comparison

__all__ = ["register"]


def _compare(
    references: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...",
            help="Two or more runs: path, id, name, unique start or end of an id, `latest`.",
        ),
    ],
    runs_dir: RunsDir = "runs",
    gate: Annotated[
        bool, typer.Option("--gate", help="Whether the second run trains as the first one does (two runs).")
    ] = False,
    tier: Annotated[
        str | None,
        typer.Option(
            metavar="TIER",
            help="exact, round-off or statistical, instead of what the catalogue says (--gate).",
        ),
    ] = None,
    run_missing: Annotated[
        bool, typer.Option("--run-missing", help="Train the runs that the gate lacks (--gate).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs with the first one: five dimensions, configuration, environment.

    With --gate the answer is the convergence gate's: exit code 0 for a pass, 1 for fail, suspicious or inconclusive,
    2 where the runs are not comparable.

    Example: drivetrain compare baseline latest --gate
    """
    from drivetrain.archive.compare import compare_runs
    from drivetrain.archive.listing import resolve_run

    if gate:
        from drivetrain.cli.gate import run_compare_gate

        raise typer.Exit(
            run_compare_gate(references, runs_dir, tier, run_missing=run_missing, as_json=as_json)
        )
    for option, given in (("--tier", tier is not None), ("--run-missing", run_missing)):
        if given:
            raise DrivetrainError(f"{option} belongs to the gate; add --gate, or drop {option}")
    comparison = compare_runs([resolve_run(reference, runs_dir) for reference in references])
    if as_json:
        show_document(comparison.document())
        return
    _print_dimensions(comparison)
    _print_accounts(comparison)
    _print_differences("configuration", comparison.configuration, comparison)
    _print_differences("environment", comparison.environment, comparison)
    for warning in comparison.warnings:
        typer.echo(f"warning: {warning}")


def _letters(comparison: "Comparison") -> list[str]:
    """Columns are called A, B, C...; ids are too long to stand above numbers."""
    return [chr(ord("A") + index) if index < 26 else f"#{index + 1}" for index in range(len(comparison.runs))]


def _print_dimensions(comparison: "Comparison") -> None:
    from rich.table import Table

    from drivetrain.archive.dimensions import format_value

    letters = _letters(comparison)
    columns = zip(letters, comparison.runs, comparison.statuses, comparison.figures, strict=True)
    for letter, run, status, figures in columns:
        note = ", partial" if figures.partial else ""
        typer.echo(f"{letter}  {run.path.name}  ({status}{note})")
    typer.echo("")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("dimension")
    table.add_column("figure")
    for index, letter in enumerate(letters):
        table.add_column(letter, justify="right")
        if index > 0:
            table.add_column(f"{letter}/A", justify="right")
    shown = ""
    for figure, values, ratios in comparison.rows():
        cells = []
        for index, (value, ratio) in enumerate(zip(values, ratios, strict=True)):
            cells.append(format_value(value, figure.unit))
            if index > 0:
                cells.append("-" if ratio is None else f"{ratio:.3f}x")
        table.add_row(figure.dimension if figure.dimension != shown else "", figure.label, *cells)
        shown = figure.dimension
    print_table(table)


def _print_accounts(comparison: "Comparison") -> None:
    """Where the mean profiled step of each run went, and by how much each class grew or shrank."""
    from rich.table import Table

    rows = list(comparison.account_rows())
    if not rows:
        return
    typer.echo("")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("account, ms a step")
    for index, letter in enumerate(_letters(comparison)):
        table.add_column(letter, justify="right")
        if index > 0:
            table.add_column(f"{letter}-A", justify="right")
    for name, values in rows:
        cells = []
        for index, value in enumerate(values):
            cells.append("-" if value is None else f"{value / 1e6:,.3f}")
            if index > 0:
                first = values[0]
                cells.append("-" if value is None or first is None else f"{(value - first) / 1e6:+,.3f}")
        table.add_row(name, *cells)
    print_table(table)


def _print_differences(
    title: str, differences: "Mapping[str, tuple[Any, ...]]", comparison: "Comparison"
) -> None:
    from rich.table import Table

    if not differences:
        typer.echo(f"\n{title}: no difference")
        return
    typer.echo("")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"{title}, differences")
    for letter in _letters(comparison):
        table.add_column(letter)
    for key, values in differences.items():
        table.add_row(key, *("-" if value is None else str(value) for value in values))
    print_table(table)


def register(app: typer.Typer) -> None:
    """Add ``compare``."""
    app.command("compare")(_compare)
