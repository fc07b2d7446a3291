"""``drivetrain report``: one page about a run, or about a whole ladder."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from drivetrain.archive.reader import Run
    from drivetrain.archive.tunes import Tune
    from drivetrain.diagnose.picture import Picture
    from drivetrain.report.blocks import Report
    from drivetrain.report.run_records import RunRecords

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("report")(_report)


def _report(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="RUN|TUNE",
            help="A run or a tune: path, id, unique start or end of an id; of a run also its name, or `latest`.",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            help="File to write.  [default: report.html in the folder of the run or tune; stdout for --markdown]",
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown instead of HTML.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Also print the summary (of a tune: its document) on stdout.")
    ] = False,
    runs_dir: Annotated[str, typer.Option("--runs-dir", help="Folder of the runs.")] = "runs",
    tunes_dir: Annotated[str, typer.Option("--tunes-dir", help="Folder of the tunes.")] = "tunes",
) -> None:
    """Write one page about a run: figures with their rules, account, curves, changes, optimisations, origin.

    One HTML file without JavaScript, to be read anywhere and forwarded. Works for a run that is running, lost,
    diverged or partly damaged, and says so. A run of a ladder shows the ladder; a tune is shown whole.

    Example: drivetrain report latest --output llama-10m.html
    """
    from drivetrain.cli.output import show_document
    from drivetrain.errors import DrivetrainError

    if as_json and markdown and output is None:
        raise DrivetrainError(
            "--json and --markdown both write to stdout; write the Markdown to a file with --output"
        )
    report, document, folder = _made(reference, runs_dir, tunes_dir)
    if markdown and output is None:
        from drivetrain.report.markdown import markdown as to_markdown

        typer.echo(to_markdown(report), nl=False)
        return
    written = _write(report, folder, output, markdown=markdown)
    if as_json:
        show_document({**document, "report": str(written)})


def _made(reference: str, runs_dir: str, tunes_dir: str) -> "tuple[Report, dict[str, Any], Path]":
    """The report, its document for --json, and the folder it is about."""
    from drivetrain.report.ladder_report import tune_report
    from drivetrain.report.run_report import run_report, summary_document

    tune = _tune(reference, runs_dir, tunes_dir)
    if tune is not None:
        # The journal by which a ladder is resumed is as long as all its trials together, and says nothing more.
        shown = {key: value for key, value in tune.document.items() if key != "pieces"}
        return tune_report(tune), shown, tune.path
    records = _records(reference, runs_dir)
    return run_report(records), summary_document(records), records.run.path


def _tune(reference: str, runs_dir: str, tunes_dir: str) -> "Tune | None":
    """The tune that is meant; None where a run is. A run goes first where both answer to a word."""
    from drivetrain.archive.listing import resolve_run
    from drivetrain.archive.tunes import find_tune, open_tune
    from drivetrain.errors import RunError

    found = find_tune(reference, tunes_dir)
    if found is None:
        return None
    if found.name != reference.rstrip("/").rpartition("/")[2]:
        try:
            resolve_run(reference, runs_dir)
        except RunError:
            return open_tune(found)
        return None
    return open_tune(found)


def _records(reference: str, runs_dir: str) -> "RunRecords":
    import dataclasses

    from drivetrain.archive.listing import resolve_run
    from drivetrain.report.run_records import read_records

    run = resolve_run(reference, runs_dir)
    picture, why_none = _picture_of(run)
    records = dataclasses.replace(read_records(run), picture=picture, picture_note=why_none)
    if records.account is not None:
        return records
    account, fault = _account_of_traces(run)
    if fault:
        return dataclasses.replace(records, faults=(*records.faults, f"the account: {fault}"))
    return dataclasses.replace(records, account=account)


def _picture_of(run: "Run") -> "tuple[Picture | None, str]":
    """The diagnosis of the run's newest window, and why there is none."""
    from drivetrain.cli.account_sources import Figures
    from drivetrain.cli.diagnose_sources import facts_of
    from drivetrain.diagnose import diagnose
    from drivetrain.diagnose.picture import picture_of
    from drivetrain.errors import DrivetrainError

    try:
        facts = facts_of([str(run.path)], figures=Figures(), rules=None, expected=())
    except (DrivetrainError, OSError) as error:
        return None, str(error)
    return picture_of(facts, diagnose(facts)), ""


def _account_of_traces(run: "Run") -> "tuple[dict[str, Any] | None, str]":
    """The account of a run that was profiled and has no ``account.json``, and why it could not be made."""
    from drivetrain.cli.account_sources import Figures, make_account
    from drivetrain.errors import DrivetrainError

    if not any((run.path / "profile").glob("*-*/*.json*")) or (run.path / "account.json").exists():
        return None, ""
    try:
        account, _ = make_account([str(run.path)], step_window="device", figures=Figures(), rules=None)
    except DrivetrainError as error:
        return None, str(error)
    return {"name_table": account.name_table, "account": account.to_document()}, ""


def _write(report: "Report", folder: "Path", output: str | None, *, markdown: bool) -> "Path":
    from pathlib import Path

    from drivetrain.archive.atomic import write_text

    if markdown:
        from drivetrain.report.markdown import markdown as render
    else:
        from drivetrain.report.html_page import html_page as render
    target = Path(output) if output is not None else folder / "report.html"
    write_text(target, render(report))
    typer.echo(f"wrote {target}", err=True)
    return target
