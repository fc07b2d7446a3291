"""``drivetrain tune``: climb the ladder, go on with one, or show one."""

from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("tune")(tune)


def tune(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG|TUNE", help="A preset or a TOML file; or a tune to go on with."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Fields to change.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Wall time of all its runs: 90s, 20m, 1h30m.  [default: 20m]"),
    ] = None,
    replay: Annotated[
        str | None, typer.Option("--replay", metavar="TUNE", help="Show a tune; nothing is run.")
    ] = None,
    tunes_dir: Annotated[str, typer.Option("--tunes-dir", help="Folder of the tunes.")] = "tunes",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ENTRY", help="Try this entry of the catalogue (repeatable)."),
    ] = None,
    no_leave_one_out: Annotated[
        bool, typer.Option("--no-leave-one-out", help="Do not remove each kept change once at the end.")
    ] = False,
    gate_steps: Annotated[
        int | None,
        typer.Option(
            "--gate-steps",
            min=20,
            help="Steps of a round-off or statistical gate's runs.  [default: 100, 200]",
        ),
    ] = None,
    short_gates: Annotated[
        bool,
        typer.Option("--short-gates", help="Gates of 40 and 60 steps: quicker, and more often inconclusive."),
    ] = False,
    trial_looks: Annotated[
        str | None,
        typer.Option(
            "--trial-looks",
            metavar="N,N",
            help="Times four blocks after which a trial is judged; more tell smaller effects apart.  [default: 1,2]",
        ),
    ] = None,
    trial_steps: Annotated[
        int | None,
        typer.Option("--trial-steps", min=4, help="Measured steps of a block.  [default: 4 s, 12 to 100]"),
    ] = None,
    knob_trials: Annotated[
        int | None,
        typer.Option("--knob-trials", min=0, help="Most trials of one knob's search; 0: none.  [default: 4]"),
    ] = None,
    grow_batch: Annotated[
        str | None,
        typer.Option(
            "--grow-batch",
            metavar="none|sqrt|linear",
            help="Under a memory limit, let the global batch grow too; rule of its learning rate.  [default: it stays]",
        ),
    ] = None,
    migrate: Annotated[
        bool,
        typer.Option(
            "--migrate",
            help="Start from one plain process, and prove each difference of the configuration by its gate.",
        ),
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            min=1,
            help="Processes of each run, with --migrate the most; on this machine, unless --launcher is given.",
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            metavar="TEMPLATE",
            help="Command that starts the processes of each run, with {command} where theirs belongs: "
            "'drivetrain lab run -- {command}'.",
        ),
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            "--goal",
            metavar="tokens_per_second|effective_tokens|memory|cost",
            help="What counts: speed, speed in tokens that carry loss, live bytes, or device time a token.  "
            "[default: tokens_per_second]",
        ),
    ] = None,
    slower_at_most: Annotated[
        str | None,
        typer.Option(
            "--slower-at-most",
            metavar="SHARE",
            help="With --goal memory: a step may take longer than the baseline's by this share.  [default: 5%]",
        ),
    ] = None,
    price_per_device_hour: Annotated[
        float | None,
        typer.Option(
            "--price-per-device-hour", help="With --goal cost: what a device costs, in any currency."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Profile the baseline and say what would be tried within the budget; nothing else is run.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Make a configuration faster, one change at a time, and prove that it trains as before.

    Profiles it, tries what the catalogue has against the largest class of the account, keeps what is measured to be
    faster and passes its convergence gate, and holds the result against the first baseline. Ctrl-C saves the state and
    exits with 130; `drivetrain tune TUNE` goes on. Exits with 1 when nothing was kept.

    Example: drivetrain tune llama-2m --budget 30m
    """
    from drivetrain.cli.tune_command import Options, run_replay, run_tune
    from drivetrain.errors import DrivetrainError

    options = Options(
        budget=budget,
        tunes_dir=tunes_dir,
        only=tuple(only or ()),
        leave_one_out=not no_leave_one_out,
        gate_steps=gate_steps,
        short_gates=short_gates,
        trial_steps=trial_steps,
        trial_looks=trial_looks,
        knob_trials=knob_trials,
        num_processes=nproc,
        grow_batch=grow_batch,
        launcher=launcher,
        migrate=migrate,
        goal=goal,
        slower_at_most=slower_at_most,
        price_per_device_hour=price_per_device_hour,
        dry_run=dry_run,
    )
    if replay is not None:
        words = [] if config is None else [config, *(overrides or [])]
        raise typer.Exit(run_replay(replay, words, options, as_json=json))
    if config is None:
        raise DrivetrainError(
            "what is to be tuned? Give a preset, a TOML file or a tune; for example: llama-2m"
        )
    raise typer.Exit(run_tune(config, overrides or [], options, as_json=json))
