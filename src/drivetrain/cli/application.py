"""The application: its verbs, and how errors become messages and exit codes."""

import importlib
import os
import sys

import typer

from drivetrain.errors import DrivetrainError

__all__ = ["application", "main"]

VERBS = ("doctor", "data", "check", "train", "profile", "generate", "runs", "compare", "mfu", "bench")
"""Modules of this package, in the order of ``--help``."""


def application() -> typer.Typer:
    """The command line with every verb."""
    app = typer.Typer(
        name="drivetrain",
        help="Pre-train language models fast on PyTorch, and account for every point of MFU that is lost.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_version)
    for verb in VERBS:
        importlib.import_module(f"drivetrain.cli.{verb}").register(app)
    return app


def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from drivetrain import __version__

        typer.echo(f"drivetrain {__version__}")
        raise typer.Exit(0)


def main() -> None:
    """Entry point of ``drivetrain``."""
    try:
        application()(standalone_mode=True)
    except DrivetrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone (`drivetrain runs list | head`): no fault of ours to report.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
