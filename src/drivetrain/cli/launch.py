"""``drivetrain launch``: a job file that runs a configuration on several hosts."""

from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("launch")(launch)


def launch(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A preset, a TOML file, or (Slurm) a run to continue.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Fields to change.")
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a batch script for sbatch.")] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Write an Indexed Job and its Service for kubectl.")
    ] = False,
    pytorchjob: Annotated[
        bool, typer.Option("--pytorchjob", help="Write a PyTorchJob for Kubeflow's training operator.")
    ] = False,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=100_000, help="Hosts.")] = 1,
    per_node: Annotated[
        int, typer.Option("--per-node", min=1, max=1024, help="Processes on each host, one for each GPU.")
    ] = 1,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FILE", help="The file to write.  [default: <name>.sbatch or <name>.json]"
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="Of the job and of the run; a job of the same name goes on with the run.  "
            "[default: run.name, else the configuration's name and four digits]",
        ),
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option("--cpus", min=1, max=4096, help="Cores of each host.  [default: Slurm: the whole host]"),
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="LIMIT", help="Slurm: time limit, such as 04:00:00.")
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Slurm: partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Slurm: account that is charged.")] = None,
    container: Annotated[
        str | None,
        typer.Option(
            "--container",
            metavar="IMAGE",
            help="Image to run in. Needed for Kubernetes; Slurm needs the plugin pyxis for it.",
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="Kubernetes: namespace of everything in the file.")
    ] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(
            "--volume",
            metavar="NAME:PATH",
            help="Mount a PersistentVolumeClaim (Slurm with --container: a host's folder) at PATH. Repeatable.",
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            "--max-restarts",
            min=0,
            max=1_000_000,
            metavar="N",
            help="When a process dies, start all again from the last checkpoint, up to N times.  "
            "[default: Slurm 0, Kubernetes 3]",
        ),
    ] = None,
    grace: Annotated[
        int,
        typer.Option(
            "--grace", min=10, max=65535, metavar="SECONDS", help="Time to save in, once the job is to end."
        ),
    ] = 120,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="KEY=VALUE", help="Variable of every process. Repeatable."),
    ] = None,
    submit: Annotated[
        bool, typer.Option("--submit", help="Also hand the file to sbatch or kubectl.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Write a job file that trains a configuration on several hosts, through torchrun.

    Every rule is checked for all processes before anything is written. The job saves before it ends, and goes on
    with its run when it starts again. A GPU is asked for each process unless run.device=cpu.

    Example: drivetrain launch llama-125m --slurm --nodes 4 --per-node 8 --time 12:00:00
    """
    from drivetrain.cli.launch_command import Wishes, run_launch

    kinds = {"slurm": slurm, "kubernetes": kubernetes, "pytorchjob": pytorchjob}
    wishes = Wishes(
        kinds=tuple(kind for kind, is_given in kinds.items() if is_given),
        nodes=nodes,
        per_node=per_node,
        out=out,
        name=name,
        cpus=cpus,
        time=time,
        partition=partition,
        account=account,
        container=container,
        namespace=namespace,
        volumes=tuple(volume or ()),
        max_restarts=max_restarts,
        grace=grace,
        environment=tuple(env or ()),
        submit=submit,
    )
    raise typer.Exit(run_launch(config, overrides or [], wishes, as_json=json))
