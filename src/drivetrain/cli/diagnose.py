"""``drivetrain diagnose``: what is lost, ranked, with evidence and remedies."""

from typing import TYPE_CHECKING, Annotated

import typer

from drivetrain.cli.account_options import (
    AchievableFlops,
    DeviceName,
    Dtype,
    Expect,
    Model,
    PeakFlops,
    Rules,
    Sources,
    TokensPerStep,
)
from drivetrain.cli.runs import AsJson

if TYPE_CHECKING:
    from drivetrain.diagnose import Diagnosis
    from drivetrain.diagnose.picture import Picture

__all__ = ["register"]

_VIEWS = ("losses", "symptoms", "search", "charts")
"""Of ``report.diagnosis_views``, which a wrong word must not wait for."""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("diagnose")(diagnose)


def diagnose(
    sources: Sources,
    model: Model = None,
    tokens_per_step: TokensPerStep = None,
    device: DeviceName = None,
    dtype: Dtype = None,
    peak_flops: PeakFlops = None,
    achievable_flops: AchievableFlops = None,
    expect: Expect = None,
    rules: Rules = None,
    fail_above: Annotated[
        float | None,
        typer.Option("--fail-above", min=0, help="Exit with 1 if a loss takes more MFU points than this."),
    ] = None,
    view: Annotated[
        str,
        typer.Option(
            "--view",
            metavar="losses|symptoms|search|charts",
            help="What to do next and losses by cost; or symptom, cause and first remedy; or the order in which an "
            "expert searches; or three charts: data gap, kernels, communication share.",
        ),
    ] = "losses",
    html: Annotated[
        str | None,
        typer.Option("--html", help="Also write a page with findings, waterfall and charts to this file."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Say what a job loses and what to do next: ranked findings with cost, evidence, and remedies of the catalogue.

    Example: drivetrain diagnose runs/20261129-141503-llama-10m-3f2a --fail-above 10
    """
    from drivetrain.cli.account_sources import Figures
    from drivetrain.cli.diagnose_sources import facts_of
    from drivetrain.cli.output import show_document
    from drivetrain.diagnose import diagnose as diagnosed
    from drivetrain.diagnose.picture import picture_of
    from drivetrain.errors import DrivetrainError

    if view not in _VIEWS:
        raise DrivetrainError(f"--view {view!r} is none of {', '.join(_VIEWS)}")
    figures = Figures(model, tokens_per_step, device, dtype, peak_flops, achievable_flops)
    facts = facts_of(sources, figures=figures, rules=rules, expected=expect or ())
    found = diagnosed(facts)
    if fail_above is not None:
        _refuse_without_points(found, fail_above)
    picture = picture_of(facts, found)
    if html is not None:
        _write_page(html, picture)
    if json:
        show_document(picture.to_document())
    else:
        from drivetrain.cli.terminal import columns, show_lines
        from drivetrain.report.diagnosis_views import VIEWS

        show_lines(VIEWS[view](picture, columns()))
    if fail_above is not None:
        _judge(found, fail_above)


def _write_page(path: str, picture: "Picture") -> None:
    from pathlib import Path

    from drivetrain.archive.atomic import write_text
    from drivetrain.report.html_page import html_page
    from drivetrain.report.section_diagnosis import diagnosis_report

    target = Path(path)
    write_text(target, html_page(diagnosis_report(picture)))
    typer.echo(f"wrote {target}", err=True)


def _refuse_without_points(found: "Diagnosis", most: float) -> None:
    from drivetrain.errors import DrivetrainError

    if found.worst_points is None:
        reason = found.mfu_reason or "the account gives no reason"
        raise DrivetrainError(f"--fail-above {most:g} cannot be judged without MFU points: {reason}")


def _judge(found: "Diagnosis", most: float) -> None:
    """Exit with 1 if a loss exceeds ``most`` MFU points."""
    worst = found.worst
    if worst is not None and worst.points is not None and worst.points > most:
        typer.echo(f"{worst.subject} takes {worst.points:.1f} points, more than {most:g}", err=True)
        raise typer.Exit(1)
