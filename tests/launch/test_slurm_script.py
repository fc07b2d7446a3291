"""The batch script: what sbatch reads in it, what the ranks get, and what becomes of the job when it ends."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_samples import ANY_TEXT, job_of
from scheduler_programs import Slurm, add_program

from drivetrain.errors import DrivetrainError
from drivetrain.launch import Job, SlurmOptions, Volume, slurm_script

OPTIONS = {
    "job-name": r"[\w.-]+",
    "nodes": r"[1-9][0-9]*(-[1-9][0-9]*)?",
    "ntasks-per-node": r"[1-9][0-9]*",
    "gpus-per-node": r"([a-z0-9]+:)?[1-9][0-9]*",
    "cpus-per-task": r"[1-9][0-9]*",
    "exclusive": None,
    "mem": r"[0-9]+[KMGT]?",
    "time": r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}",
    "partition": r"[\w.@+-]+(,[\w.@+-]+)*",
    "account": r"[\w.@+-]+",
    "signal": r"(R|B|RB)?:?([A-Z0-9]+)(@[0-9]{1,5})?",
    "requeue": None,
    "output": r"[^\s]+",
    "open-mode": r"append|truncate",
}
"""Options that sbatch(1) documents, and the form of each one's value; None: it has none."""

AGENT = """#!/bin/bash
printf '%s\\0' "$SLURM_NODEID" "$@" > "$FAKE_SLURM/agent-$SLURM_NODEID.new"
mv "$FAKE_SLURM/agent-$SLURM_NODEID.new" "$FAKE_SLURM/agent-$SLURM_NODEID"
"""
"""A python that only notes what it was asked to run."""

SAVES = """#!/bin/bash
trap 'sleep "${FAKE_SAVING:-0}"; echo saved > "$FAKE_SLURM/saved-$SLURM_NODEID"; exit "${FAKE_STOPPED:-1}"' TERM
"""
WAITS = SAVES + AGENT + "for ((tick = 0; tick < 3000; tick++)); do sleep 0.02; done\nexit 9\n"
"""One that runs until it is asked to stop, and saves."""


def words_of(file: Path) -> list[str]:
    return file.read_bytes().decode().split("\0")[:-1]


class Batch:
    """A script with stand-ins for everything that it calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, agent: str, nodes: int = 2) -> None:
        self.folder = folder
        self.slurm = Slurm(folder / "slurm", nodes)
        self.file = folder / "job.sbatch"
        monkeypatch.setattr(sys, "executable", str(add_program(folder / "python", agent)))
        self.write(job_of(container=None, volumes=(), nodes=2))
        self.started: list[subprocess.Popen[str]] = []

    def write(self, job: Job) -> None:
        self.file.write_text(slurm_script(job, SlurmOptions(self.folder)))

    def start(self, **variables: str) -> "subprocess.Popen[str]":
        self.started.append(self.slurm.start(self.file, **variables))
        return self.started[-1]

    def wait_for_agents(self) -> None:
        deadline = time.monotonic() + 600
        while not all((self.slurm.folder / name).exists() for name in ("agent-0", "agent-1", "tasks")):
            assert time.monotonic() < deadline, "the agents did not start"
            time.sleep(0.02)


@pytest.fixture
def batch_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Batch]]:
    made: list[Batch] = []

    def make(agent: str, nodes: int = 2) -> Batch:
        made.append(Batch(tmp_path, monkeypatch, agent, nodes))
        return made[-1]

    yield make
    for batch in made:
        for process in batch.started:
            if process.poll() is None:
                batch.slurm.end(process)


# What sbatch reads.

SCRIPTS = {
    "whole hosts": (job_of(container=None, volumes=()), SlurmOptions(Path("/home/me/a b"))),
    "everything": (
        job_of(cpus_per_node=16, volumes=(Volume("/scratch", "/data"),), environment={"NCCL_DEBUG": "a b"}),
        SlurmOptions(Path("/home/me"), "1-12:00:00", "a100,h100", "team_1"),
    ),
    "no GPUs": (job_of(gpus_per_node=0, container=None, nodes=1), SlurmOptions(Path("/"), "90")),
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_every_directive_is_an_option_of_sbatch_with_a_legal_value(case: str) -> None:
    lines = slurm_script(*SCRIPTS[case]).splitlines()
    assert lines[0] == "#!/bin/bash"
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    found = []
    for number, line in enumerate(lines):
        if not line.startswith("#SBATCH"):
            continue
        assert number < first_command, "sbatch reads no directive after the first command"
        directive = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
        assert directive is not None, line
        form = OPTIONS[directive[1]]
        assert (directive[2] is None) if form is None else re.fullmatch(form, directive[2] or ""), line
        found.append(directive[1])
    assert len(found) == len(set(found)), "none twice"
    assert {"job-name", "nodes", "ntasks-per-node", "signal", "requeue", "open-mode"} <= set(found)


def test_directives_follow_the_job() -> None:
    text = slurm_script(*SCRIPTS["everything"])
    for line in (
        "nodes=2",
        "ntasks-per-node=1",
        "gpus-per-node=4",
        "cpus-per-task=16",
        "time=1-12:00:00",
        "partition=a100,h100",
        "account=team_1",
        "signal=B:USR1@120",
    ):
        assert f"#SBATCH --{line}\n" in text
    assert "#SBATCH --exclusive" not in text
    assert "gpus-per-node" not in slurm_script(*SCRIPTS["no GPUs"])
    assert "#SBATCH --exclusive\n#SBATCH --mem=0\n" in slurm_script(*SCRIPTS["whole hosts"])


@pytest.mark.parametrize("case", SCRIPTS)
def test_bash_accepts_the_script(case: str, tmp_path: Path) -> None:
    file = tmp_path / "job.sbatch"
    file.write_text(slurm_script(*SCRIPTS[case]))
    done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("time", "grace"), [("4", 120), ("0:30", 15), ("1-0:0:1", 65535)])
def test_a_time_limit_without_room_to_save_is_refused(time: str, grace: int) -> None:
    with pytest.raises(DrivetrainError, match="give more than"):
        slurm_script(job_of(grace_seconds=grace), SlurmOptions(Path("/"), time))


def test_mounts_that_would_be_read_as_several_are_refused() -> None:
    with pytest.raises(DrivetrainError, match="cannot be mounted"):
        slurm_script(job_of(volumes=(Volume("scratch", "/data"),)), SlurmOptions(Path("/home")))
    with pytest.raises(DrivetrainError, match="cannot be mounted"):
        slurm_script(job_of(), SlurmOptions(Path("/home/a,b")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runs_dir": "/scratch/runs"}, "give --volume /scratch/runs:/scratch/runs"),
        ({"runs_dir": "../runs"}, "on no volume"),
        ({"runs_dir": "/data/../runs"}, "on no volume"),
        ({"config": "/etc/mine.toml"}, "give --volume /etc:/etc"),
        ({"volumes": (Volume("/a", "/data"), Volume("/b", "/data/"))}, "taken by something else"),
        ({"volumes": (Volume("/a", "/home"), Volume("/b", "/data"))}, "taken by something else"),
    ],
)
def test_a_container_that_would_lose_or_miss_a_file_is_refused(changes: dict[str, Any], words: str) -> None:
    with_mounts = {"volumes": (Volume("/scratch", "/data"),), **changes}
    with pytest.raises(DrivetrainError, match=re.escape(words)):
        slurm_script(job_of(**with_mounts), SlurmOptions(Path("/home")))
    if "volumes" not in changes:
        slurm_script(job_of(**changes, container=None, volumes=()), SlurmOptions(Path("/home")))


def test_a_container_may_keep_its_run_and_its_configuration_where_it_starts() -> None:
    job = job_of(volumes=(), runs_dir="runs", config="/home/mine.toml")
    assert "--container-mounts=/home:/home" in slurm_script(job, SlurmOptions(Path("/home")))


# What the ranks get.


def test_any_override_and_variable_arrives_unchanged(batch_of: Callable[..., Batch]) -> None:
    agent = (
        AGENT
        + 'printf "%s\\0" "$ODD" > "$FAKE_SLURM/variable"; cp "$FAKE_SLURM/agent-0" "$FAKE_SLURM/last"\n'
    )
    batch = batch_of(agent, nodes=1)

    @settings(max_examples=25)
    @given(st.lists(ANY_TEXT, min_size=4, max_size=12), ANY_TEXT)
    def arrives(overrides: list[str], variable: str) -> None:
        job = job_of(
            nodes=1, container=None, volumes=(), overrides=tuple(overrides), environment={"ODD": variable}
        )
        batch.write(job)
        checked = subprocess.run(
            ["bash", "-n", str(batch.file)], capture_output=True, check=False, timeout=240
        )
        assert (checked.returncode, checked.stderr) == (0, b"")
        (batch.slurm.folder / "last").unlink(missing_ok=True)
        done = batch.slurm.run(batch.file)
        assert done.returncode == 0, done.stderr
        words = words_of(batch.slurm.folder / "last")
        begin = words.index("train")
        assert words[begin - 2 : begin] == ["-m", "drivetrain"]
        assert words[begin + 1 :] == ["llama-2m", *overrides, "--resume"]
        assert words_of(batch.slurm.folder / "variable") == [variable]

    arrives()


def test_each_node_has_one_agent_and_the_first_serves_the_rendezvous(batch_of: Callable[..., Batch]) -> None:
    batch = batch_of(AGENT)
    done = batch.slurm.run(batch.file)
    assert done.returncode == 0, done.stderr
    for node in range(2):
        words = words_of(batch.slurm.folder / f"agent-{node}")
        assert words[:3] == [str(node), "-m", "torch.distributed.run"]
        assert f"--rdzv-conf=is_host={1 if node == 0 else 0},read_timeout=600" in words
        assert "--rdzv-endpoint=127.0.0.1:21234" in words, "the first host, and a port of the job's own"
        assert "--rdzv-id=1234-0" in words
        assert f"--log-dir=/data/runs/logs/first-3f2a/1234-0/node-{node}" in words
        assert {"--nnodes=2", "--nproc-per-node=4", "--max-restarts=3", "--rdzv-backend=c10d"} <= set(words)
    asked = (batch.slurm.folder / "srun").read_text().split()
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(asked)


@pytest.mark.parametrize("job_id", [1, 9999, 67_108_863])
def test_every_jobs_port_is_one_that_the_system_does_not_give_away(
    batch_of: Callable[..., Batch], job_id: int
) -> None:
    batch = batch_of(AGENT, nodes=1)
    batch.write(job_of(nodes=1, container=None, volumes=()))
    done = batch.slurm.run(batch.file, SLURM_JOB_ID=str(job_id))
    assert done.returncode == 0, done.stderr
    (endpoint,) = [
        word for word in words_of(batch.slurm.folder / "agent-0") if word.startswith("--rdzv-endpoint=")
    ]
    assert 1024 <= int(endpoint.rpartition(":")[2]) < 32768


def test_an_agent_gives_its_ranks_the_jobs_time_to_save() -> None:
    script = slurm_script(job_of(grace_seconds=77, container=None, volumes=()), SlurmOptions(Path("/")))
    assert "\nexport TORCH_ELASTIC_SHUTDOWN_TIMEOUT=77\n" in script
    assert "#SBATCH --signal=B:USR1@77\n" in script


def test_a_run_that_goes_on_is_named_and_not_looked_for() -> None:
    job = job_of(
        config="/runs/20260101-000000-a-1234", overrides=(), continues=True, container=None, volumes=()
    )
    text = slurm_script(job, SlurmOptions(Path("/")))
    assert "    /runs/20260101-000000-a-1234\n)" in text
    assert "--resume" not in text


def test_a_container_has_the_working_directory_and_the_mounts(batch_of: Callable[..., Batch]) -> None:
    batch = batch_of(AGENT)
    batch.write(job_of(volumes=(Volume("/scratch/a b", "/data"),)))
    add_program(batch.slurm.folder / "programs" / "python", AGENT)
    done = batch.slurm.run(batch.file)
    assert done.returncode == 0, done.stderr
    asked = (batch.slurm.folder / "srun").read_text().splitlines()
    folder = batch.folder
    assert f"--container-mounts={folder}:{folder},/scratch/a b:/data" in asked
    assert {"--container-image=registry.example/drivetrain:1.0", f"--container-workdir={folder}"} <= set(
        asked
    )


# What becomes of the job.


def test_a_job_that_ends_ends(batch_of: Callable[..., Batch]) -> None:
    batch = batch_of(AGENT)
    assert batch.slurm.run(batch.file).returncode == 0
    assert batch.slurm.requeued() == []


def test_a_job_that_fails_fails_with_the_worst_code_and_is_not_started_again(
    batch_of: Callable[..., Batch],
) -> None:
    batch = batch_of(AGENT + 'exit "$((5 + SLURM_NODEID))"\n')
    assert batch.slurm.run(batch.file).returncode == 6
    assert batch.slurm.requeued() == []


def test_a_job_file_for_other_nodes_than_there_are_starts_nothing(batch_of: Callable[..., Batch]) -> None:
    batch = batch_of(AGENT, nodes=3)
    done = batch.slurm.run(batch.file)
    assert done.returncode == 2
    assert "for 2 node(s), and Slurm gave 3" in done.stderr
    assert not (batch.slurm.folder / "srun").exists()


def test_before_the_time_limit_every_node_saves_and_the_job_is_started_again(
    batch_of: Callable[..., Batch],
) -> None:
    batch = batch_of(WAITS)
    process = batch.start(FAKE_SAVING="0.5")
    batch.wait_for_agents()
    os.kill(process.pid, signal.SIGUSR1)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert all((batch.slurm.folder / f"saved-{node}").exists() for node in range(2))
    assert batch.slurm.requeued() == ["1234"]
    assert "--signal=TERM 1234" in (batch.slurm.folder / "scancel").read_text()
    assert "the time limit is near" in errors


def test_a_node_that_has_saved_does_not_end_one_that_is_still_at_it(batch_of: Callable[..., Batch]) -> None:
    batch = batch_of(WAITS.replace("sleep", "((SLURM_NODEID)) && sleep", 1))
    process = batch.start(FAKE_SAVING="1")
    batch.wait_for_agents()
    os.kill(process.pid, signal.SIGUSR1)
    _, errors = process.communicate(timeout=240)
    assert (batch.slurm.folder / "saved-1").exists(), errors
    assert batch.slurm.requeued() == ["1234"]


def test_a_job_that_is_killed_while_it_saves_near_the_limit_is_started_again(
    batch_of: Callable[..., Batch],
) -> None:
    batch = batch_of(WAITS)
    process = batch.start(FAKE_SAVING="60")
    batch.wait_for_agents()
    os.kill(process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 600
    while not (batch.slurm.folder / "scancel").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    batch.slurm.signal_tasks(signal.SIGKILL)
    _, errors = process.communicate(timeout=240)
    assert batch.slurm.requeued() == ["1234"], errors


def test_a_preempted_job_is_started_again(batch_of: Callable[..., Batch]) -> None:
    batch = batch_of(WAITS)
    process = batch.start()
    batch.wait_for_agents()
    batch.slurm.signal_tasks()
    _, errors = process.communicate(timeout=240)
    assert batch.slurm.requeued() == ["1234"], errors
    assert not (batch.slurm.folder / "scancel").exists()


def test_a_cancelled_job_stays_so(batch_of: Callable[..., Batch]) -> None:
    batch = batch_of(WAITS)
    process = batch.start()
    batch.wait_for_agents()
    os.kill(process.pid, signal.SIGTERM)
    batch.slurm.signal_tasks()
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 143, errors
    assert batch.slurm.requeued() == []


def test_a_run_that_ends_when_the_limit_is_near_is_not_started_again(batch_of: Callable[..., Batch]) -> None:
    batch = batch_of(WAITS)
    process = batch.start(FAKE_STOPPED="0")
    batch.wait_for_agents()
    os.kill(process.pid, signal.SIGUSR1)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert batch.slurm.requeued() == []


def test_where_slurm_does_not_requeue_the_user_is_told(batch_of: Callable[..., Batch]) -> None:
    batch = batch_of(WAITS)
    add_program(
        batch.slurm.folder / "programs" / "scontrol",
        '#!/bin/bash\nif [ "$1" = show ]; then echo a; echo b; else exit 1; fi\n',
    )
    process = batch.start()
    batch.wait_for_agents()
    os.kill(process.pid, signal.SIGUSR1)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 143
    assert "would not requeue" in errors
