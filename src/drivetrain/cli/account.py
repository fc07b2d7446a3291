"""``drivetrain account``: where the wall time of profiled steps went."""

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
    from pathlib import Path

    from drivetrain.measure.account import Account
    from drivetrain.trace.slices import RankSplit

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("account")(account)


def account(
    sources: Sources,
    step_window: Annotated[
        str,
        typer.Option("--step-window", help="device: by launched device work; cpu: the host's step marks."),
    ] = "device",
    model: Model = None,
    tokens_per_step: TokensPerStep = None,
    device: DeviceName = None,
    dtype: Dtype = None,
    peak_flops: PeakFlops = None,
    achievable_flops: AchievableFlops = None,
    rules: Rules = None,
    kernels: Annotated[
        int,
        typer.Option(
            "--kernels",
            min=0,
            help="Also list the N top operators, kernels, matrix products and waits of the first trace.",
        ),
    ] = 0,
    expect: Expect = None,
    html: Annotated[str | None, typer.Option("--html", help="Write a page to this file.")] = None,
    svg: Annotated[str | None, typer.Option("--svg", help="Write the waterfall to this file.")] = None,
    perfetto: Annotated[
        str | None,
        typer.Option(
            "--perfetto", help="Write the classes of every instant as a timeline (.json or .json.gz)."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Split the wall time of profiled steps into classes that add up, with what is hidden, exposed and waited for.

    Reads PyTorch (Kineto) traces of any trainer. With FLOPs known - our own runs, or --model and
    --tokens-per-step - the classes become a waterfall of MFU.

    Example: drivetrain account rank0.json.gz rank1.json.gz --html account.html
    """
    from drivetrain.cli.account_sources import Figures, make_account, timeline_target
    from drivetrain.cli.output import show_document
    from drivetrain.errors import DrivetrainError

    if json and kernels:
        raise DrivetrainError(
            "--kernels is text only, and --json one document of the account; drop one of them"
        )
    target = None if perfetto is None else timeline_target(perfetto, sources)
    splits: list[RankSplit] = []
    figures = Figures(model, tokens_per_step, device, dtype, peak_flops, achievable_flops)
    made, title = make_account(
        sources,
        step_window=step_window,
        figures=figures,
        rules=rules,
        expected=expect or (),
        on_split=None if target is None else splits.append,
    )
    if html is not None:
        from drivetrain.report.account_page import account_page

        _write(html, account_page(made, title))
    if svg is not None:
        _write_waterfall(svg, made, title)
    if target is not None:
        _write_timeline(target, splits, made, title)
    if json:
        show_document(made.to_document())
    else:
        from drivetrain.report.account_text import account_text

        typer.echo(account_text(made, title))
        if kernels:
            from drivetrain.cli.account_sources import kernels_of

            typer.echo(kernels_of(sources, count=kernels, figures=figures, rules=rules))


def _write(path: str, content: str) -> "Path":
    from pathlib import Path

    from drivetrain.archive.atomic import write_text

    target = Path(path)
    write_text(target, content)
    typer.echo(f"wrote {target}", err=True)
    return target


def _write_waterfall(path: str, made: "Account", title: str) -> None:
    from drivetrain.errors import DrivetrainError
    from drivetrain.report.waterfall import waterfall_svg

    if made.waterfall is None:
        raise DrivetrainError(f"no waterfall to write to {path}: the traces hold no window of any length")
    _write(path, waterfall_svg(made.waterfall, title))


def _write_timeline(target: "Path", splits: "list[RankSplit]", made: "Account", title: str) -> None:
    from drivetrain.archive.atomic import write_bytes
    from drivetrain.report.perfetto import perfetto_json

    compress = target.name.endswith(".gz")
    content = perfetto_json(splits, title=title, name_table=made.name_table, compress=compress)
    write_bytes(target, content)
    typer.echo(f"wrote {target}", err=True)
