"""A job as plain facts, whoever schedules it: how many processes, and what each of them runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from drivetrain.launch.quoting import require_text

__all__ = ["Job", "Volume"]

READ_TIMEOUT_SECONDS = 600
"""How long an agent waits for the host of the rendezvous, whose machine or pod may start later."""


@dataclass(frozen=True)
class Volume:
    """Storage that every host has at ``path``; ``source`` is a claim (Kubernetes) or a host's folder (Slurm)."""

    source: str
    path: str


@dataclass(frozen=True)
class Job:
    """What is to run, and where.

    Attributes:
        name: of the job and of the run; the same name finds the run again.
        nodes, per_node: hosts, and processes on each.
        config: preset, file or run directory, as the hosts name it.
        overrides: ``section.field=value``, the verb's own included.
        runs_dir: folder of the runs, as the hosts name it; the ranks' output goes to ``logs`` in it.
        gpus_per_node: 0 on a CPU.
        max_restarts: how often the processes are started again after one of them has failed.
        grace_seconds: from the request to stop until the processes are killed.
        cpus_per_node: None: all of a host's where the scheduler has a word for that.
        container: image; None: the hosts' own software.
        volumes, environment: what the processes find there.
        continues: ``config`` is a run directory, whose run goes on.
    """

    name: str
    nodes: int
    per_node: int
    config: str
    overrides: tuple[str, ...]
    runs_dir: str
    gpus_per_node: int
    max_restarts: int
    grace_seconds: int
    cpus_per_node: int | None = None
    container: str | None = None
    volumes: tuple[Volume, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    continues: bool = False

    def __post_init__(self) -> None:
        assert self.nodes >= 1
        assert self.per_node >= 1
        for value in (self.config, *self.overrides):
            require_text("CONFIG and its overrides", value)

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.nodes * self.per_node

    @property
    def log_folder(self) -> str:
        """Folder of the ranks' output; each host adds a part of its own."""
        return f"{self.runs_dir.rstrip('/')}/logs/{self.name}"

    def agent_arguments(self) -> list[str]:
        """Options of torchrun that are the same for every host and scheduler."""
        return [
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.per_node}",
            "--rdzv-backend=c10d",
            # Each rank's output goes to a file of its own, and on to the job's.
            "--tee=3",
        ]

    def train_arguments(self) -> list[str]:
        """What torchrun starts. A job that starts again goes on with the run that it has made."""
        resume = [] if self.continues else ["--resume"]
        return ["-m", "drivetrain", "train", self.config, *self.overrides, *resume]

    def variables(self) -> dict[str, str]:
        """Environment of the agents and, through them, of the ranks."""
        return {
            # torchrun would choose 1 by itself and warn; the engine sets its own number of threads.
            "OMP_NUM_THREADS": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.grace_seconds),
            **self.environment,
        }
