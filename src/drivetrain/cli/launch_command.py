"""What ``drivetrain launch`` does: check for all processes, write one file, hand it over where that is asked."""

import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigurationError, DrivetrainError, RunError

if TYPE_CHECKING:
    from drivetrain.config import LoadedConfig
    from drivetrain.launch import Job

__all__ = ["Wishes", "run_launch"]

_KINDS = "--slurm, --kubernetes or --pytorchjob"
_NAME_LENGTH = 40


@dataclass(frozen=True)
class Wishes:
    """The verb's options, as they were given; None where one was not."""

    kinds: tuple[str, ...]
    nodes: int
    per_node: int
    out: str | None
    name: str | None
    cpus: int | None
    time: str | None
    partition: str | None
    account: str | None
    container: str | None
    namespace: str | None
    volumes: tuple[str, ...]
    max_restarts: int | None
    grace: int
    environment: tuple[str, ...]
    submit: bool

    def kind(self) -> str:
        """The one kind of file. Raises DrivetrainError where none or several are asked for, or what it has not."""
        if len(self.kinds) != 1:
            given = " and ".join(f"--{kind}" for kind in self.kinds) or "none"
            raise DrivetrainError(f"a job file is for one scheduler: give one of {_KINDS} (given: {given})")
        (kind,) = self.kinds
        if kind == "slurm":
            foreign = {"--namespace": self.namespace}
            if self.container is None and self.volumes:
                raise DrivetrainError(
                    "--volume with --slurm mounts into a container: add --container, or drop it"
                )
        else:
            foreign = {"--time": self.time, "--partition": self.partition, "--account": self.account}
        for option, value in foreign.items():
            if value is not None:
                raise DrivetrainError(f"{option} means nothing to --{kind}; drop it")
        return kind

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.nodes * self.per_node


def run_launch(source: str, overrides: Sequence[str], wishes: Wishes, *, as_json: bool) -> int:
    """The verb; returns the exit code."""
    from drivetrain.archive.atomic import write_text
    from drivetrain.cli.output import show_document
    from drivetrain.launch import require_program, submit

    kind = wishes.kind()
    program = "sbatch" if kind == "slurm" else "kubectl"
    if wishes.submit:
        require_program(program)
    loaded, added = _configuration(source, overrides, wishes, kind)
    _refuse_broken_rules(loaded, wishes)
    job = _job(loaded, [*overrides, *added], wishes, kind)
    text = _text(job, source, wishes, kind)
    default = f"{job.name}.{'sbatch' if kind == 'slurm' else 'json'}"
    path = Path(wishes.out if wishes.out is not None else default)
    if os.path.lexists(path):  # A link to nothing is there as well.
        raise DrivetrainError(f"{path} is there already; give another --out, or remove it")
    write_text(path, text)
    command = [program, str(path)] if kind == "slurm" else [program, "apply", "-f", str(path)]
    _say(loaded, added, job, wishes, path)
    document: dict[str, Any] = {
        "kind": kind,
        "file": str(path),
        "world_size": job.world_size,
        "command": command,
        "submitted": submit(command) if wishes.submit else None,
    }
    if as_json:
        show_document(document)
    elif wishes.submit:
        print(document["submitted"])
    else:
        print(f"{path}: submit it with: {shlex.join(command)}")
    return 0


def _configuration(
    source: str, overrides: Sequence[str], wishes: Wishes, kind: str
) -> "tuple[LoadedConfig, list[str]]":
    """The configuration that every process will have, and the overrides that it has from this verb."""
    from drivetrain.config import load_config
    from drivetrain.tune.short_run import as_override

    loaded = load_config(source, overrides)
    if _is_run(source):
        _refuse_for_a_run(source, overrides, wishes, kind)
        return loaded, []
    given = loaded.config.run.name
    if wishes.name is not None and given is not None and wishes.name != given:
        raise DrivetrainError(
            f"--name {wishes.name} and run.name={given}: job and run share a name; give one"
        )
    added = []
    if given is None:
        name = wishes.name if wishes.name is not None else _new_name(loaded.name, kind)
        # Also where the name is "none", which as a bare word would be no name at all.
        added.append(as_override("run.name", name))
    if loaded.config.run.device == "auto":
        # The job asks for GPUs: a process that finds none must say so, and not train on its CPU.
        added.append("run.device=cuda")
    return load_config(source, [*overrides, *added]), added


def _new_name(name: str, kind: str) -> str:
    """A name that no other job has: of the same name a job would go on with the other's run."""
    from drivetrain.launch.names import kubernetes_name_like

    base = name[:_NAME_LENGTH] if kind == "slurm" else kubernetes_name_like(name, _NAME_LENGTH)
    return f"{base}-{secrets.token_hex(2)}"


def _is_run(source: str) -> bool:
    return (Path(source) / "run.json").is_file()


def _refuse_for_a_run(source: str, overrides: Sequence[str], wishes: Wishes, kind: str) -> None:
    from drivetrain.archive.reader import open_run

    if kind != "slurm":
        raise RunError(
            f"{source} is a run on this machine, and pods have folders of their own; the job that made it goes on with "
            "it when it is applied again"
        )
    if overrides:
        raise RunError(
            f"{source} is a run: it continues with its own configuration, so {overrides[0]!r} cannot be changed; "
            f"for a new run give {Path(source) / 'config.toml'} with the overrides"
        )
    if wishes.name is not None:
        raise RunError(f"--name: {source} is a run and has a name; drop --name")
    if open_run(source).status() == "finished":
        raise RunError(f"{source} is finished; for a new run give {Path(source) / 'config.toml'}")


def _refuse_broken_rules(loaded: "LoadedConfig", wishes: Wishes) -> None:
    from drivetrain.catalogue.rules import all_rules
    from drivetrain.config import LaunchFacts, violations

    device = loaded.config.run.device
    facts = LaunchFacts(
        world_size=wishes.world_size,
        local_world_size=wishes.per_node,
        source_name=loaded.name,
        # What this machine has says nothing of the hosts.
        device_type=None if device == "auto" else device,
    )
    broken = violations(loaded.config, facts, all_rules())
    if broken:
        raise ConfigurationError(*(str(violation) for violation in broken))


def _job(loaded: "LoadedConfig", overrides: Sequence[str], wishes: Wishes, kind: str) -> "Job":
    from drivetrain.launch import Job, Volume
    from drivetrain.launch.kubernetes import CONFIG_FOLDER
    from drivetrain.launch.names import environment_of

    source, continues = loaded.source, _is_run(loaded.source)
    if _is_a_path(source):
        resolved = Path(source).resolve() if continues else _config_file(source).resolve()
        source = str(resolved) if kind == "slurm" else f"{CONFIG_FOLDER}/config.toml"
    volumes = []
    for volume in wishes.volumes:
        name, colon, path = volume.partition(":")
        if not colon:
            raise DrivetrainError(f"--volume {volume!r}: expected NAME:PATH, such as --volume training:/data")
        volumes.append(Volume(name, path))
    restarts = wishes.max_restarts
    run = loaded.config.run
    return Job(
        name=run.name or loaded.name,
        nodes=wishes.nodes,
        per_node=wishes.per_node,
        config=source,
        overrides=tuple(overrides),
        runs_dir=run.runs_dir,
        gpus_per_node=0 if run.device == "cpu" else wishes.per_node,
        max_restarts=restarts if restarts is not None else 0 if kind == "slurm" else 3,
        grace_seconds=wishes.grace,
        cpus_per_node=wishes.cpus,
        container=wishes.container,
        volumes=tuple(volumes),
        environment=environment_of(wishes.environment),
        continues=continues,
    )


def _is_a_path(source: str) -> bool:
    """Whether ``source``, which was loaded, is a file or a folder: a preset's name goes before a file of that name."""
    from drivetrain.config import preset_names

    return source not in preset_names()


def _text(job: "Job", source: str, wishes: Wishes, kind: str) -> str:
    from drivetrain.launch import SlurmOptions, indexed_job, pytorch_job, slurm_script

    if kind == "slurm":
        options = SlurmOptions(Path.cwd(), wishes.time, wishes.partition, wishes.account)
        return slurm_script(job, options)
    from drivetrain.archive.encoding import dumps

    file = _config_file(source) if _is_a_path(source) else None
    config_text = file.read_text(encoding="utf-8-sig") if file is not None else None
    write = indexed_job if kind == "kubernetes" else pytorch_job
    return dumps(write(job, wishes.namespace, config_text), indent=True).decode() + "\n"


def _config_file(source: str) -> Path:
    path = Path(source)
    return path / "config.toml" if path.is_dir() else path


def _say(loaded: "LoadedConfig", added: Sequence[str], job: "Job", wishes: Wishes, path: Path) -> None:
    """What a user should know of the job before it starts, on stderr."""
    from drivetrain.addresses import ADDRESS_VARIABLE, is_withheld
    from drivetrain.config import LaunchFacts, idle_fields, layout_of
    from drivetrain.config.blend import corpora_of
    from drivetrain.config.hosts import crossing_groups
    from drivetrain.launch.names import is_on_a_mount

    reasons = {
        "run.name": "job and run share a name, by which the run is found again",
        "run.device": "the job asks for a GPU for each process; run.device=cpu asks for none",
    }
    for override in added:
        print(f"note: {override}, because {reasons[override.partition('=')[0]]}", file=sys.stderr)
    facts = LaunchFacts(world_size=job.world_size, local_world_size=job.per_node)
    for idle in idle_fields(loaded.config, facts):
        print(f"note: {idle}", file=sys.stderr)
    for warning in crossing_groups(layout_of(loaded.config, job.world_size), job.per_node):
        print(f"warning: {warning}", file=sys.stderr)
    data = loaded.config.data.data_path
    if data is not None and any(is_withheld(one.prefix) for one in corpora_of(data)):
        print(
            "note: data.data_path is signed, and the job file does not hold the signature: the job needs "
            f"{ADDRESS_VARIABLE} in its environment",
            file=sys.stderr,
        )
    if job.container is not None and data is not None:
        mounts = [volume.path for volume in job.volumes]
        # What a URL names is brought by the job itself.
        paths = [one.prefix for one in corpora_of(data) if "://" not in one.prefix]
        if "slurm" in wishes.kinds:
            paths = [os.path.join(Path.cwd(), path) for path in paths]
            mounts = [*mounts, str(Path.cwd())]
        for path_of_data in paths:
            if not is_on_a_mount(path_of_data, mounts):
                print(
                    f"note: data.data_path = {path_of_data} is on no volume: it must be in the image",
                    file=sys.stderr,
                )
    if "slurm" in wishes.kinds and not path.resolve().parent.samefile(Path.cwd()):
        print("note: the job's own output goes to the folder that sbatch is called in", file=sys.stderr)
