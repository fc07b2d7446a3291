"""``drivetrain lab up | run | show | down``: a small network on this machine."""

from typing import Annotated

import typer

__all__ = ["register"]

_HELP = """A small network on this machine: hosts in namespaces, behind links of a chosen rate. Needs root.

\b
Example:
  drivetrain lab up --hosts 2 --rate 800mbit
  drivetrain lab run -- drivetrain train llama-2m training.micro_batch_size=8
  drivetrain lab down
"""

_Name = Annotated[str, typer.Option("--name", help="Of the lab; several may be up at once.")]
_AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    lab = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    lab.command("up")(up)
    lab.command("run", context_settings={"ignore_unknown_options": True})(run)
    lab.command("show")(show)
    lab.command("down")(down)
    app.add_typer(lab, name="lab", help=_HELP)


def up(
    hosts: Annotated[int, typer.Option("--hosts", help="Hosts.")] = 2,
    ranks: Annotated[int, typer.Option("--ranks", help="Processes that a command has on each host.")] = 1,
    rate: Annotated[
        str,
        typer.Option(
            "--rate", help="Of each host's link, each way: 800mbit, 1.5gbit, or up/down: 1gbit/200mbit."
        ),
    ] = "1gbit",
    link: Annotated[
        list[str] | None,
        typer.Option(
            "--link", metavar="HOST=RATE", help="Another rate for one host, numbered from 0. Repeatable."
        ),
    ] = None,
    name: _Name = "lab",
    json: _AsJson = False,
) -> None:
    """Make a lab. It stays until it is taken down, or the machine restarts.

    Example: drivetrain lab up --hosts 2 --ranks 2 --rate 800mbit
    """
    from drivetrain.cli.lab_command import lab_up

    raise typer.Exit(lab_up(hosts, ranks, rate, link or [], name, as_json=json))


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What every rank runs, after two dashes.")
    ],
    name: _Name = "lab",
    time_limit: Annotated[
        str | None,
        typer.Option(
            "--time-limit", metavar="TIME", help="End it after this time: 90s, 20m, 1h30m.  [default: none]"
        ),
    ] = None,
    json: _AsJson = False,
) -> None:
    """Run a command once for each rank of a lab, with the environment that torchrun would give it.

    What rank 0 prints is printed; whatever else the ranks say goes to stderr, with their number. The exit code is that
    of the first rank that fails; 124: the time was up. When it ends, nothing of it is left running.

    Example: drivetrain lab run -- drivetrain train llama-2m training.micro_batch_size=8
    """
    from drivetrain.cli.lab_command import lab_run

    raise typer.Exit(lab_run(command, name, time_limit, as_json=json))


def show(json: _AsJson = False) -> None:
    """Show the labs there are: shape, rates, what runs in them, what has passed their links.

    Example: drivetrain lab show --json
    """
    from drivetrain.cli.lab_command import lab_show

    raise typer.Exit(lab_show(as_json=json))


def down(
    name: Annotated[
        str | None, typer.Option("--name", help="Only this lab.  [default: all]", show_default=False)
    ] = None,
    json: _AsJson = False,
) -> None:
    """Take labs down, with whatever runs in them; also what was left behind by a lab that was killed.

    Example: drivetrain lab down
    """
    from drivetrain.cli.lab_command import lab_down

    raise typer.Exit(lab_down(name, as_json=json))
