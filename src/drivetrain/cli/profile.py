"""``drivetrain profile``: a short run with a window of steps under the profiler."""

from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("profile")(profile)


def profile(
    source: Annotated[
        str, typer.Argument(metavar="CONFIG|RUN", help="A preset, a TOML file, or a run to start again.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Fields to change.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to profile.")] = 10,
    start: Annotated[
        int | None,
        typer.Option("--start", min=4, help="First profiled step. Default: as early as can be calibrated."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Processes on this machine, data-parallel.")
    ] = None,
    parent: Annotated[
        str | None,
        typer.Option("--parent", metavar="RUN", help="The run that this one is a change of; it is recorded."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Profile a window of steps and say what the profiler itself cost.

    Trains a new, short run: warm-up, as many steps without the profiler as with it, the window on every rank, and
    again as many steps without. A RUN is not continued: its configuration is started again, with as many
    processes. The account of the window is written to the run's account.json.

    Example: drivetrain profile llama-10m --steps 20 --nproc 2 --json
    """
    from drivetrain.cli.profile_command import run_profile

    raise typer.Exit(
        run_profile(
            source,
            overrides or [],
            steps=steps,
            start=start,
            num_processes=nproc,
            parent=parent,
            as_json=json,
        )
    )
