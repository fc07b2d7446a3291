"""The application: its verbs, and how errors become messages and exit codes."""

import importlib
import io
import os
import signal
import sys
from types import FrameType
from typing import Any, TextIO

import typer
import typer.core

from drivetrain.addresses import take_secrets, withheld
from drivetrain.collector import collect_seldom
from drivetrain.errors import DrivetrainError

__all__ = ["application", "main"]

VERBS = (
    "doctor",
    "data",
    "config",
    "check",
    "train",
    "launch",
    "profile",
    "memory",
    "account",
    "diagnose",
    "tune",
    "generate",
    "runs",
    "compare",
    "report",
    "mfu",
    "catalogue",
    "ops",
    "bench",
    "lab",
)
"""Modules of this package, in the order of ``--help``."""


def application() -> typer.Typer:
    """The command line with every verb."""
    app = typer.Typer(
        cls=_Verbs,
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


class _Verbs(typer.core.TyperGroup):
    """The group of verbs. What becomes of a reader that has gone is decided here: typer would exit with 1."""

    def invoke(self, ctx: Any) -> Any:
        stdout: TextIO | None = sys.stdout  # None where the shell closed it (`>&-`)
        try:
            try:
                return super().invoke(ctx)
            finally:
                if stdout is not None:
                    stdout.flush()
        except (BrokenPipeError, SystemExit) as error:
            # rich turns a broken pipe into an exit of its own.
            if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
                raise
            # The reader of our output has gone (`drivetrain runs list | head`): no fault of ours to report.
            if stdout is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
            answer = error.__context__
            raise typer.Exit(answer.exit_code if isinstance(answer, typer.Exit) else 0) from None


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of ``drivetrain``."""
    collect_seldom()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's encoding lacks is shown with escapes, as it is on stderr.
        sys.stdout.reconfigure(errors="backslashreplace")
    # As Ctrl-C, until a run is there to be saved: what was half done is cleaned up, and the exit code is 130.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        # Before anything can show or record them.
        take_secrets(sys.argv, os.environ)
        application()(standalone_mode=True)
    except DrivetrainError as error:
        print(f"error: {withheld(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        # The system refuses something at a place that has no better words for it (too long a name, no
        # permission, no room for our own output): the user's to mend, all the same.
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
