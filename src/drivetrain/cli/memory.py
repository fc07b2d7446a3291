"""``drivetrain memory``: what fills memory during a step, predicted and measured."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("memory")(memory)


def memory(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RUN", help="A preset, a TOML file, or a run with a profile of its memory."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Fields to change.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Processes of the run. Default: as few as can be.")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option("--ranks", metavar="0,7", help="Ranks to show. Default: one of each kind.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Train a few steps on this machine, and measure the last of them."),
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure", metavar="FILE", help="Draw the step to an SVG. A run gets memory.svg in any case."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Show live bytes by category: parameters, optimizer, gradients, activations, communication, temporaries.

    Of a CONFIG they are predicted without running it; with --measure a new run of a few steps is started as well. A RUN
    must have been profiled with profiler.profile_memory=true; what was measured is shown beside what its configuration
    lets expect, and both are written to its memory.json.

    Exit code 0: every rank is shown; 1: a rank has no prediction, or the run did not finish; 2: bad input, or no rank
    can be shown.

    Example: drivetrain memory llama-10m training.micro_batch_size=8 --figure memory.svg
    """
    from drivetrain.cli.memory_command import run_memory

    raise typer.Exit(
        run_memory(
            source,
            overrides or [],
            num_processes=devices,
            ranks=ranks,
            measure=measure,
            figure=figure,
            as_json=json,
        )
    )
