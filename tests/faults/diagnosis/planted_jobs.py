"""Jobs as somebody starts them, with a fault or without: ``drivetrain train``, or a loop of the user's own."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.errors import EnvironmentFault
from drivetrain.lab import Lab
from rank_processes import free_port

__all__ = ["STEPS_FILE", "TIME_LIMIT_S", "TRACE_FILE", "Job", "Wire", "run"]

TIME_LIMIT_S = 300.0
TRACE_FILE, STEPS_FILE = "trace.json", "steps.json"
_OWN_CODE = "own_code"
_STEPS = (
    "training.train_iters=40",
    "training.eval_iters=0",
    "profiler.profile_step_start=8",
    "profiler.profile_step_end=14",
)
"""Of a job that says nothing else: steps to warm up, five profiled ones that count, and as many as a mean takes."""


@dataclass(frozen=True)
class Wire:
    """The network lab that a job's ranks are on.

    Attributes:
        hosts, ranks: hosts, and ranks on each.
        rate: of each link, as ``800mbit``.
        links: other rates, by number of the host.
    """

    hosts: int = 2
    ranks: int = 1
    rate: str = "800mbit"
    links: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A training job as somebody would start it.

    Attributes:
        folder: where it is started, and where its run is written.
        config: a preset's name, or the path of a configuration file.
        overrides: of the configuration; they go before the harness's own (:data:`_STEPS`).
        world_size: processes. With a wire, hosts times ranks.
        environment: variables of every process.
        own_code: source of a module of the user's, which any process imports as ``own_code``: what ``data.transform``
            names. None: the user has none.
        starts_training: whether the user's own script starts training, so that ``own_code`` is imported before it.
        wire: the lab that the ranks are on; None: they are on this machine.
        loop: source of a training loop of the user's own, which is started instead of ``drivetrain train``. It writes
            ``trace.json`` by torch's profiler and ``steps.json``, the seconds of the steps it has not profiled, into
            the folder that it is started in.
        reads_per_second: of the disk that a container of its own allows it, where nothing of the corpus is in memory
            yet; None: as many as there are. Needs root and the cgroup ``blkio``.
    """

    folder: Path
    config: str
    overrides: tuple[str, ...] = ()
    world_size: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    own_code: str | None = None
    starts_training: bool = False
    wire: Wire | None = None
    loop: str | None = None
    reads_per_second: int | None = None


def run(job: Job, *, profiled: bool = True) -> Path:
    """Train it to the end; its run directory.

    Raises:
        AssertionError: it did not end well; what it said is the message.
    """
    runs = job.folder / "runs"
    environment = {**_environment(job), **job.environment}
    if job.loop is not None:
        return _own_loop(job.loop, runs, environment)
    leaves = [*_STEPS, f"run.runs_dir={runs}", f"profiler.profile={str(profiled).lower()}"]
    leaves += ["profiler.profile_ranks=all"] if profiled and job.world_size > 1 else []
    first = f"import {_OWN_CODE}; " if job.starts_training else ""
    code = f"{first}from drivetrain.cli import main; main()"
    command = [sys.executable, "-c", code, "train", job.config, *leaves, *job.overrides, "--json"]
    with contextlib.ExitStack() as stack:
        if job.reads_per_second is not None:
            container = stack.enter_context(_slow_disk(job, job.reads_per_second))
            command = ["sh", "-c", f'echo $$ > {container}/cgroup.procs && exec "$@"', "sh", *command]
        if job.wire is not None:
            said = _on_a_wire(job, command, environment)
        else:
            said = _on_this_machine(job, command, environment)
    return Path(json.loads(said)["run"])


def _own_loop(source: str, runs: Path, environment: Mapping[str, str]) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="own-loop-", dir=runs))
    script = folder / "train.py"
    script.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return folder


_CONTAINERS = Path("/sys/fs/cgroup/blkio")


@contextlib.contextmanager
def _slow_disk(job: Job, reads_per_second: int) -> Iterator[Path]:
    """A container with few reads of the disk that the corpora are on; they are out of memory when it is entered.

    Raises:
        EnvironmentFault: no such container can be made here.
    """
    number = os.stat(job.folder).st_dev
    container = _CONTAINERS / f"drivetrain-faults-{os.getpid()}"
    try:
        container.mkdir()
    except OSError as error:
        raise EnvironmentFault(
            f"no container with a slow disk can be made ({error}): it takes root and {_CONTAINERS}"
        ) from error
    try:
        limit = f"{os.major(number)}:{os.minor(number)} {reads_per_second}"
        (container / "blkio.throttle.read_iops_device").write_text(limit, encoding="ascii")
        for path in job.folder.glob("*.bin"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield container
    finally:
        container.rmdir()


def _environment(job: Job) -> dict[str, str]:
    """Of every process. Nothing that this machine has measured before is known in the folder's own cache."""
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "1",
        "DRIVETRAIN_CACHE": str(job.folder / "cache"),
    }
    if job.own_code is not None:
        code = job.folder / f"code-{hashlib.sha256(job.own_code.encode()).hexdigest()[:12]}"
        code.mkdir(parents=True, exist_ok=True)
        (code / f"{_OWN_CODE}.py").write_text(job.own_code, encoding="utf-8")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH")]))
    return environment


def _on_this_machine(job: Job, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """One process, or ranks as torchrun would start them; what the first printed."""
    port = str(free_port()) if job.world_size > 1 else ""
    processes = []
    for rank in range(job.world_size):
        told = {} if job.world_size == 1 else _told(rank, job.world_size, port)
        processes.append(
            subprocess.Popen(
                command,
                cwd=job.folder,
                env={**os.environ, **environment, **told},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{errors[-4000:]}"
    return outputs[0][0]


def _told(rank: int, world_size: int, port: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _on_a_wire(job: Job, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Ranks of a lab of their own; what the first printed."""
    wire = job.wire
    assert wire is not None
    assert wire.hosts * wire.ranks == job.world_size, "the wire has other ranks than the job"
    with Lab(wire.hosts, wire.ranks, wire.rate, links=wire.links) as lab:
        done = lab.run(command, environment=environment, folder=job.folder, time_limit_s=TIME_LIMIT_S)
        return done.check().ranks[0].stdout
