"""``drivetrain config import``: another trainer's arguments as a configuration."""

from typing import Annotated

import typer

__all__ = ["register"]

_HELP = """Configurations of other trainers.

\b
Example:
  drivetrain config import train_llama.sh --output llama.toml
  drivetrain check llama.toml
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    config = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    config.command("import")(import_)
    # Without it typer would make the one command the verb itself.
    config.callback()(_group)
    app.add_typer(config, name="config", help=_HELP)


def _group() -> None:
    """Nothing: the verb is a group."""


def import_(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A shell script or command line, a dump of arguments (YAML, JSON), or a torchtitan job file.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Fields to give beside the file."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="megatron|mindspeed|torchtitan",
            help="Whose it is.  [default: its content tells]",
        ),
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A shell variable that the file does not set. Repeatable."
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            min=1,
            help="Processes of the job.  [default: what its launcher is told, if anything]",
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", metavar="TOML", help="Where to write it.  [default: stdout]")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that is there.")] = False,
    allow_missing: Annotated[
        bool,
        typer.Option(
            "--allow-missing", help="Write it although something is left out that changes the training."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Convert the arguments of Megatron-LM, MindSpeed or torchtitan. Nothing in the file is executed.

    Each argument is listed: taken over, the same here, not supported, unknown. Exit code 0: written; 1: something that
    changes the training is not supported or not known, and nothing is written; 2: it cannot be read, or what it asks
    for breaks a rule.

    Example: drivetrain config import pretrain_gpt.sh --set DATA_PATH=corpus/books --output gpt.toml
    """
    from drivetrain.cli.config_command import ImportOptions, run_import

    options = ImportOptions(
        source=source,
        variables=tuple(variables or ()),
        devices=devices,
        output=output,
        overwrite=overwrite,
        allow_missing=allow_missing,
    )
    raise typer.Exit(run_import(file, overrides or [], options, as_json=json))
