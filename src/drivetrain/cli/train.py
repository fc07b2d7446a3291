"""``drivetrain train``: train a model, or continue a run."""

from typing import Annotated

import typer

from drivetrain.errors import DrivetrainError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("train")(train)


def train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A preset, a TOML file, or a run to continue.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Fields to change.")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", min=1, help="Processes on this machine. Default: parallelism's sizes multiplied."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Build everything and start nothing.")] = False,
    overfit_batch: Annotated[
        bool,
        typer.Option(
            "--overfit-batch", help="Train on one batch until its loss is near zero, or say why not."
        ),
    ] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Keep the first step's gradients and the leak probe's result, for the gate."
        ),
    ] = False,
    perturb_ulp: Annotated[
        int | None,
        typer.Option(
            "--perturb-ulp",
            min=0,
            max=2**63 - 1,
            metavar="SEED",
            help="Move each initial weight by one unit in the last place of the compute dtype, for the gate.",
        ),
    ] = None,
    parent: Annotated[
        str | None,
        typer.Option("--parent", metavar="RUN", help="The run that this one is a change of; it is recorded."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run named run.name in run.runs_dir; where there is none yet, start it.",
        ),
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            min=0,
            max=1_000_000,
            metavar="N",
            help="With several processes: when one dies, start all again from the last checkpoint, up to N times.",
        ),
    ] = 0,
    compare_single: Annotated[
        bool,
        typer.Option(
            "--compare-single",
            help="Train the first steps on several processes and on one, which must hold the whole model, and say "
            "whether both train the same.",
        ),
    ] = False,
    compare_steps: Annotated[
        int | None,
        typer.Option(
            "--compare-steps",
            min=1,
            max=1000,
            metavar="K",
            help="With --compare-single: how many. Default: 3.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Train a language model.

    CONFIG is a preset's name (`drivetrain train nothing` lists them), a TOML file, or a run directory, which
    is continued from its newest checkpoint. Ctrl-C saves the state and exits with 130; a second one does not
    wait. Also runs under torchrun.

    Example: drivetrain train llama-2m training.train_iters=100 --json
    """
    if compare_single:
        from drivetrain.cli.compare_single import run_compare_single

        raise typer.Exit(
            run_compare_single(
                config,
                overrides or [],
                num_processes=nproc,
                steps=compare_steps,
                as_json=json,
                beside={
                    "--dry-run": dry_run,
                    "--overfit-batch": overfit_batch,
                    "--probe": probe,
                    "--perturb-ulp": perturb_ulp is not None,
                    "--parent": parent is not None,
                    "--resume": resume,
                    "--max-restarts": max_restarts > 0,
                },
            )
        )
    if compare_steps is not None:
        raise DrivetrainError("--compare-steps belongs to --compare-single; add that, or drop it")
    from drivetrain.cli.beginning import Beginning
    from drivetrain.cli.train_command import run_train

    raise typer.Exit(
        run_train(
            config,
            overrides or [],
            num_processes=nproc,
            dry=dry_run,
            overfit=overfit_batch,
            as_json=json,
            resume=resume,
            max_restarts=max_restarts,
            beginning=Beginning(probe=probe, perturb_ulp=perturb_ulp, parent=parent),
        )
    )
