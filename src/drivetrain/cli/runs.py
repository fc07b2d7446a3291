"""``drivetrain runs list | show | tag``: look at the archive."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from drivetrain.cli.output import show_document

if TYPE_CHECKING:
    from rich.table import Table

    from drivetrain.archive.reader import Run

__all__ = ["AsJson", "RunsDir", "print_table", "register"]

RunsDir = Annotated[str, typer.Option("--runs-dir", help="Folder of the runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_Reference = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A path, an id, a name, unique start or end of an id, or `latest`."),
]


def print_table(table: "Table") -> None:
    """Print a table as wide as it is: cut or wrapped columns would be useless in a pipe."""
    from rich.console import Console

    # A table takes the width it needs; the limit only has to be out of reach.
    Console(highlight=False, markup=False, emoji=False, width=100_000).print(table)


def _plain_table() -> "Table":
    from rich.table import Table

    return Table(box=None, pad_edge=False, header_style="bold")


def _row(run: "Run") -> dict[str, Any]:
    """What the list shows of one run; reads only the ends of its files."""
    recent = run.recent_metrics()
    summary = run.summary() or {}
    beat = run.heartbeat() or {}
    last = recent[-1] if recent else {}
    # Without a summary: the last step that did nothing but train.
    steady = next((line for line in reversed(recent) if not line.get("tags")), last)

    def either(key: str, metric: str, line: dict[str, Any]) -> Any:
        return summary[key] if summary.get(key) is not None else line.get(metric)

    return {
        "run": run.path.name,
        "name": run.name,
        "status": run.status(),
        "step": summary.get("steps") or last.get("step", beat.get("step")),
        "steps": run.raw_config().get("training", {}).get("train_iters"),
        "loss": either("final_loss", "train/loss", last),
        "tokens_per_second": either("tokens_per_second", "throughput/tokens_per_sec", steady),
        "mfu": either("mfu", "throughput/device/mfu", steady),
        "tags": run.tags(),
        "created": run.manifest["created"],
    }


def _list(runs_dir: RunsDir = "runs", as_json: AsJson = False) -> None:
    """List the runs of a folder, oldest first.

    Example: drivetrain runs list --runs-dir runs
    """
    from drivetrain.archive.dimensions import format_value
    from drivetrain.archive.listing import list_runs
    from drivetrain.errors import DrivetrainError

    faults: list[str] = []
    rows = []
    for run in list_runs(runs_dir, on_fault=faults.append):
        try:
            rows.append(_row(run))
        except DrivetrainError as error:
            faults.append(str(error))
    for fault in faults:
        typer.echo(f"warning: left out: {fault}", err=True)
    if as_json:
        show_document({"schema": 1, "runs": rows, "unreadable": faults})
        return
    if not rows:
        typer.echo(f"no runs in {runs_dir}", err=True)
        return
    table = _plain_table()
    for heading in ("run", "status", "step", "loss", "tok/s", "MFU", "tags", "started"):
        table.add_column(heading, justify="right" if heading in ("step", "loss", "tok/s", "MFU") else "left")
    for row in rows:
        table.add_row(
            row["run"],
            row["status"],
            f"{_or_dash(row['step'])}/{_or_dash(row['steps'])}",
            format_value(row["loss"], "nat/token"),
            format_value(row["tokens_per_second"], "token/s"),
            format_value(row["mfu"], "share"),
            " ".join(row["tags"]),
            _local_time(row["created"]),
        )
    print_table(table)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _local_time(created: str) -> str:
    import datetime

    try:
        return f"{datetime.datetime.fromisoformat(created).astimezone():%Y-%m-%d %H:%M}"
    except ValueError:
        return created


def _show(reference: _Reference, runs_dir: RunsDir = "runs", as_json: AsJson = False) -> None:
    """Show one run: configuration, origin, the five dimensions, events.

    Example: drivetrain runs show latest
    """
    from drivetrain.archive.dimensions import figures_of
    from drivetrain.archive.listing import resolve_run

    run = resolve_run(reference, runs_dir)
    figures = figures_of(run)
    if as_json:
        show_document(
            {
                "schema": 1,
                **_row(run),
                "path": str(run.path.resolve()),
                "manifest": run.manifest,
                "configuration": run.raw_config(),
                "segments": [{"index": each.index, "start_step": each.start_step} for each in run.segments()],
                "end": run.end(),
                "figures": dict(figures.values),
                "reasons": dict(figures.reasons),
                "partial": figures.partial,
                "events": run.events(),
            }
        )
        return
    _print_heading(run)
    _print_figures(run)
    _print_configuration(run)
    _print_events(run)


def _print_heading(run: "Run") -> None:
    manifest, row = run.manifest, _row(run)
    provenance, devices = manifest["provenance"], manifest["devices"]
    git = provenance.get("git") or {}
    code = git.get("reason") or "-"
    if git.get("commit"):
        changes = ", with changes" if git.get("dirty") else ""
        code = f"{git['commit'][:12]} ({git.get('branch') or 'detached'}){changes}"
    packages = provenance.get("packages") or {}
    end = run.end()
    reason = f" ({end['reason']})" if end is not None and end.get("reason") else ""
    lines = {
        "run": run.path,
        "status": f"{row['status']}{reason}, step {_or_dash(row['step'])} of {_or_dash(row['steps'])}",
        "started": f"{_local_time(manifest['created'])}, {len(run.segments())} segment(s)",
        "tags": " ".join(row["tags"]) or "-",
        "command": " ".join(provenance.get("command") or []) or "-",
        "code": code,
        "packages": " ".join(f"{name} {version}" for name, version in packages.items() if version) or "-",
        "devices": f"{devices.get('count')} x {devices.get('name') or devices.get('type')}",
        "host": provenance.get("host"),
        "data": manifest["dataset"].get("fingerprint"),
        "seed": manifest["seed"],
    }
    for label, value in lines.items():
        typer.echo(f"{label:<10} {_or_dash(value)}")


def _print_figures(run: "Run") -> None:
    from drivetrain.archive.dimensions import DIMENSIONS, figures_of, format_value

    figures = figures_of(run)
    note = f", partial, from {figures.source}" if figures.partial else ""
    typer.echo(f"\nfive dimensions{note}")
    shown = ""
    for figure in DIMENSIONS:
        value = figures.values[figure.key]
        why = f"  ({figures.reasons[figure.key]})" if value is None and figure.key in figures.reasons else ""
        dimension = figure.dimension if figure.dimension != shown else ""
        typer.echo(f"  {dimension:<20} {figure.label:<22} {format_value(value, figure.unit):>12}{why}")
        shown = figure.dimension
    for name, rule in ((run.summary() or {}).get("mfu_rule") or {}).items():
        typer.echo(f"  {name:<20} {rule}")


def _print_configuration(run: "Run") -> None:
    typer.echo(f"\nconfiguration ({run.path / 'config.toml'})")
    for section, leaves in run.raw_config().items():
        if isinstance(leaves, dict):
            settings = "  ".join(f"{name}={value}" for name, value in leaves.items())
            typer.echo(f"  {section:<14} {settings}")


def _print_events(run: "Run") -> None:
    import datetime

    typer.echo("\nevents")
    for event in run.events():
        moment = datetime.datetime.fromtimestamp(event["time"])
        common = ("schema", "time", "segment", "kind")
        own = [(key, value) for key, value in event.items() if key not in common and value is not None]
        details = "  ".join(f"{key}={value}" for key, value in own)
        typer.echo(f"  {moment:%Y-%m-%d %H:%M:%S}  {event['kind']:<12} {details}".rstrip())


def _tag(
    reference: _Reference,
    tag: Annotated[
        str, typer.Argument(metavar="TAG", help="Letters, digits and `. _ : / -`, at most 64 characters.")
    ],
    remove: Annotated[bool, typer.Option("--remove", help="Take the tag away.")] = False,
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Tag a run, running or not. A tag is an event: nothing is rewritten.

    Example: drivetrain runs tag latest baseline
    """
    import re

    from drivetrain.archive.listing import resolve_run
    from drivetrain.archive.writer import append_event
    from drivetrain.errors import RunError

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}", tag):
        raise RunError(
            f"{tag!r} cannot be a tag: start with a letter or digit, then letters, digits and . _ : / -, "
            f"at most 64 characters"
        )
    run = resolve_run(reference, runs_dir)
    tags = run.tags()
    if remove and tag not in tags:
        raise RunError(f"{run.path.name} has no tag {tag!r}; its tags are: {', '.join(tags) or 'none'}")
    if remove or tag not in tags:
        append_event(run.path, "tag", tag=tag, action="remove" if remove else "add")
    tags = run.tags()
    if as_json:
        show_document({"schema": 1, "run": run.path.name, "tags": tags})
    else:
        typer.echo(f"{run.path.name}: {' '.join(tags) or 'no tags'}")


def register(app: typer.Typer) -> None:
    """Add ``runs`` with its three verbs."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show and tag runs.")
    group.command("list")(_list)
    group.command("show")(_show)
    group.command("tag")(_tag)
    app.add_typer(group, name="runs")
