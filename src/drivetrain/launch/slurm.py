"""A batch script for Slurm: one torchrun agent on each node, saved before the time limit and requeued.

Options are those of sbatch(1) and srun(1). What the script relies on, all documented there or in scancel(1):

* ``--signal=B:USR1@s`` reaches the batch shell alone, ``s`` seconds (or up to a minute more) before the limit;
* ``scancel --signal=TERM`` reaches the tasks of the steps, and not the batch shell;
* SIGTERM to ``srun`` itself makes it kill its tasks, so that nothing is ever sent to it.
"""

import posixpath
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from drivetrain import __version__
from drivetrain.errors import DrivetrainError
from drivetrain.launch.job import READ_TIMEOUT_SECONDS, Job
from drivetrain.launch.names import (
    is_on_a_mount,
    require_absolute_path,
    require_image,
    require_slurm_word,
    slurm_seconds,
)
from drivetrain.launch.quoting import bash_word, require_text

__all__ = ["SlurmOptions", "slurm_script"]

STOPPED = 143
"""Exit code of a node whose agent was asked to stop: 128 + SIGTERM, as a shell has it."""

_ON_NODE = f"""
stopped=
trap "stopped=yes" TERM
if [ "$SLURM_NODEID" = 0 ]; then host=1; else host=0; fi
logs=$1 python=$2
shift 2
"$python" -m torch.distributed.run --rdzv-conf="is_host=$host,read_timeout={READ_TIMEOUT_SECONDS}" \\
    --log-dir="$logs/node-$SLURM_NODEID" "$@"
code=$?
if [ "$code" -ne 0 ] && [ -n "$stopped" ]; then code={STOPPED}; fi
exit "$code"
"""


@dataclass(frozen=True)
class SlurmOptions:
    """What only Slurm knows.

    Attributes:
        working_directory: absolute; relative paths of the configuration start there.
        time: limit in one of sbatch's forms; None: the partition's.
        partition, account: None: the cluster's defaults.
    """

    working_directory: Path
    time: str | None = None
    partition: str | None = None
    account: str | None = None


def slurm_script(job: Job, options: SlurmOptions) -> str:
    """The batch script.

    Raises:
        DrivetrainError: a value that an ``#SBATCH`` line cannot hold, a time limit without room to save, or a container
            without a mount for what the run needs and leaves.
    """
    _require_time_to_save(job, options)
    folder = require_text("the working directory", str(options.working_directory))
    if job.container is not None:
        require_image(job.container)
        _require_mounts(job, folder)
    python = "python" if job.container is not None else require_text("the interpreter", sys.executable)
    agent = [python, *job.agent_arguments(), f"--max-restarts={job.max_restarts}"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{directive}" for directive in _directives(job, options)),
        "",
        f"# Written by Drivetrain {__version__}: {job.nodes} node(s) with {job.per_node} process(es) each.",
        "# Submitted again, it goes on with the run that it has made.",
        "set -u",
        *_SIGNALS,
        f"cd {bash_word(folder)} || exit 2",
        *_exports(job),
        "",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f'if [ "${{#hosts[@]}}" -ne {job.nodes} ]; then',
        f'    echo "error: this job file is for {job.nodes} node(s), and Slurm gave ${{#hosts[@]}}: '
        'write another one" >&2',
        "    exit 2",
        "fi",
        "attempt=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}",
        "# Two jobs may share a node: each has a port of its own, below those that the system gives away.",
        "port=$((20000 + SLURM_JOB_ID % 10000))",
        "",
        *_array("agent", agent),
        'agent+=(--rdzv-id="$attempt" --rdzv-endpoint="${hosts[0]}:$port")',
        *_array("train", job.train_arguments()),
        f"on_node={shlex.quote(_ON_NODE)}",
        "",
        *_running(job, folder),
        "",
        *_ENDING,
    ]
    return "\n".join(lines) + "\n"


def _require_time_to_save(job: Job, options: SlurmOptions) -> None:
    if options.time is None:
        return
    seconds = slurm_seconds(options.time)
    if 0 < seconds <= 2 * job.grace_seconds:
        raise DrivetrainError(
            f"--time {options.time} is {seconds} s, and the run is asked to save {job.grace_seconds} s before its end "
            f"(--grace): give more than {2 * job.grace_seconds} s, or a smaller --grace"
        )


def _require_mounts(job: Job, folder: str) -> None:
    """Each path is mounted once, and what the run reads and leaves is on one of them."""
    for path in (folder, *(path for volume in job.volumes for path in (volume.source, volume.path))):
        require_absolute_path("a container's mount", path)
    mounts = [folder]
    for volume in job.volumes:
        if volume.path.rstrip("/") in mounts:
            raise DrivetrainError(f"--volume: {volume.path} is taken by something else; give another path")
        mounts.append(volume.path.rstrip("/"))
    runs_dir = posixpath.join(folder, job.runs_dir)
    if not is_on_a_mount(runs_dir, mounts):
        raise DrivetrainError(
            f"run.runs_dir = {job.runs_dir} is on no volume, so that what the run saves would end with its container; "
            f"give --volume {runs_dir}:{runs_dir}, or a folder in {folder}, which is mounted"
        )
    # A preset has a name and no path.
    if job.config.startswith("/") and not is_on_a_mount(job.config, mounts):
        place = posixpath.dirname(job.config)
        raise DrivetrainError(
            f"{job.config} is on no volume, so that the container does not have it; give --volume {place}:{place}, or "
            f"put it in {folder}, which is mounted"
        )


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    directives = [
        f"job-name={require_slurm_word('--name', job.name)}",
        f"nodes={job.nodes}",
        "ntasks-per-node=1",
    ]
    if job.gpus_per_node:
        directives.append(f"gpus-per-node={job.gpus_per_node}")
    if job.cpus_per_node is not None:
        directives.append(f"cpus-per-task={job.cpus_per_node}")
    else:
        # One task a node would be given one core: the job has its nodes to itself, with all their memory.
        directives += ["exclusive", "mem=0"]
    if options.time is not None:
        directives.append(f"time={options.time}")
    for option, value in (("partition", options.partition), ("account", options.account)):
        if value is not None:
            directives.append(f"{option}={require_slurm_word(f'--{option}', value)}")
    return [
        *directives,
        f"signal=B:USR1@{job.grace_seconds}",
        "requeue",
        f"output={job.name}-%j.out",
        "open-mode=append",
    ]


def _exports(job: Job) -> list[str]:
    return [f"export {name}={bash_word(value)}" for name, value in job.variables().items()]


def _array(name: str, words: list[str]) -> list[str]:
    return [f"{name}=(", *(f"    {bash_word(word)}" for word in words), ")"]


def _running(job: Job, folder: str) -> list[str]:
    options = [f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1"]
    if job.cpus_per_node is not None:
        options.append(f"--cpus-per-task={job.cpus_per_node}")
    # A node that has saved must not end the others, which may still be at it.
    options += ["--kill-on-bad-exit=0", "--cpu-bind=none"]
    if job.container is not None:
        mounts = [f"{folder}:{folder}", *(f"{volume.source}:{volume.path}" for volume in job.volumes)]
        options += [
            f"--container-image={job.container}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={folder}",
        ]
    return [
        *_array("srun_options", options),
        f'logs={bash_word(job.log_folder)}/"$attempt"',
        'srun "${srun_options[@]}" bash -c "$on_node" node "$logs" "${agent[@]}" "${train[@]}" &',
        "step=$!",
        "# A trapped signal ends wait before the step does.",
        'while [ -n "$again" ]; do',
        "    again=",
        '    wait "$step"',
        "    code=$?",
        "done",
    ]


_SIGNALS = [
    "limit= cancelled= again=yes",
    "near_the_limit() {",
    "    limit=yes again=yes",
    '    echo "the time limit is near: the run is asked to save" >&2',
    '    scancel --signal=TERM "$SLURM_JOB_ID"',
    "}",
    "trap near_the_limit USR1",
    "trap 'cancelled=yes again=yes' TERM",
]

_ENDING = [
    f"# {STOPPED}: the ranks were asked to stop and not by us, so the job is preempted. What was cancelled stays so.",
    f'if [ "$code" -ne 0 ] && [ -z "$cancelled" ] && {{ [ -n "$limit" ] || [ "$code" -eq {STOPPED} ]; }}; then',
    '    echo "the run goes on when this job is started again" >&2',
    '    scontrol requeue "$SLURM_JOB_ID" && exit 0',
    '    echo "error: Slurm would not requeue the job; submit the file again to go on" >&2',
    "fi",
    'exit "$code"',
]
