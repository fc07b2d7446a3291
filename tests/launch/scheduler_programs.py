"""Stand-ins for Slurm's programs: nodes are process groups of this machine.

They do what srun(1), scancel(1) and scontrol(1) promise of the calls that our script makes, and no more: tasks are
signalled by ``scancel`` and not through ``srun``, which kills its tasks when it is itself asked to end.
"""

import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Slurm"]

_SRUN = """#!/bin/bash
kill_others=1
while [[ $1 == --* ]]; do
    case $1 in
        --nodes=*) nodes=${1#*=} ;;
        --kill-on-bad-exit=0) kill_others=0 ;;
    esac
    printf '%s\\n' "$1" >> "$FAKE_SLURM/srun"
    shift
done
tasks=()
for ((node = 0; node < nodes; node++)); do
    SLURM_NODEID=$node setsid "$@" &
    tasks+=($!)
done
trap 'for task in "${tasks[@]}"; do kill -KILL -- "-$task"; done' TERM
printf '%s\\n' "${tasks[@]}" > "$FAKE_SLURM/tasks.new"
mv "$FAKE_SLURM/tasks.new" "$FAKE_SLURM/tasks"
worst=0
for task in "${tasks[@]}"; do
    wait -n
    code=$?
    ((code > worst)) && worst=$code
    if ((code != 0 && kill_others)); then
        for other in "${tasks[@]}"; do kill -KILL -- "-$other" 2> /dev/null; done
    fi
done
exit "$worst"
"""

_SCANCEL = """#!/bin/bash
printf '%s ' "$@" >> "$FAKE_SLURM/scancel"
while read -r task; do kill -TERM -- "-$task"; done < "$FAKE_SLURM/tasks"
"""

_SCONTROL = """#!/bin/bash
case "$1 $2" in
    "show hostnames") for ((node = 0; node < FAKE_NODES; node++)); do echo "127.0.0.$((node + 1))"; done ;;
    "requeue "*) echo "$2" >> "$FAKE_SLURM/requeued" ;;
    *) exit 1 ;;
esac
"""


class Slurm:
    """A folder of stand-ins, and what was asked of them."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.nodes = nodes
        programs = folder / "programs"
        programs.mkdir(parents=True)
        for name, text in (("srun", _SRUN), ("scancel", _SCANCEL), ("scontrol", _SCONTROL)):
            add_program(programs / name, text)

    def start(self, script: Path, job_id: int = 1234, **variables: str) -> "subprocess.Popen[str]":
        """The batch shell of ``script``, as Slurm starts it."""
        return subprocess.Popen(
            ["bash", str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=self.environment(job_id, variables),
        )

    def run(self, script: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
        """The batch script from beginning to end."""
        process = self.start(script, **variables)
        try:
            out, errors = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            self.end(process)
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)

    def environment(self, job_id: int, variables: Mapping[str, str]) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.folder / 'programs'}:{os.environ['PATH']}",
            "FAKE_SLURM": str(self.folder),
            "FAKE_NODES": str(self.nodes),
            "SLURM_JOB_ID": str(job_id),
            "SLURM_JOB_NODELIST": "node[0-1]",
            **variables,
        }

    def signal_tasks(self, number: signal.Signals = signal.SIGTERM) -> None:
        """To every process of every task, and to nothing else. SIGTERM: a preemption with a grace period."""
        for task in (self.folder / "tasks").read_text().split():
            os.killpg(int(task), number)

    def requeued(self) -> list[str]:
        """Jobs that ``scontrol requeue`` was called for."""
        file = self.folder / "requeued"
        return file.read_text().split() if file.exists() else []

    def end(self, process: "subprocess.Popen[str]") -> None:
        """Leave nothing running."""
        tasks = self.folder / "tasks"
        for group in [str(process.pid), *(tasks.read_text().split() if tasks.exists() else [])]:
            try:
                os.killpg(int(group), signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.communicate(timeout=120)


def add_program(path: Path, text: str) -> Path:
    """An executable file."""
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    assert shutil.which(str(path))
    return path
