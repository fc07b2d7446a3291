"""Job files run for real: two hosts are two agents of this machine, on loopback."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from job_samples import job_of
from kubernetes_types import expanded
from scheduler_programs import Slurm, add_program

from drivetrain.archive.reader import Run, open_run
from rank_processes import free_port
from runs_on_the_spot import Tiny

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="process groups, setsid"),
    pytest.mark.timeout(1800),
]


def launched(tiny: Tiny, *arguments: str) -> dict[str, Any]:
    done = tiny.run("launch", str(tiny.file), *arguments, "--nodes", "2", "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def runs_of(tiny: Tiny) -> list[Run]:
    return [open_run(path.parent) for path in sorted(tiny.runs.glob("*/run.json"))]


def starts(run: Run) -> list[str]:
    return [event["kind"] for event in run.events() if event["kind"] in ("start", "resume")]


@pytest.mark.long
def test_a_batch_script_trains_on_two_nodes_and_knows_when_nothing_is_left(tiny: Tiny) -> None:
    document = launched(tiny, "training.train_iters=2", "training.eval_iters=0", "--slurm", "--name", "first")
    assert document["world_size"] == 2
    slurm = Slurm(tiny.folder / "slurm", 2)
    script = tiny.folder / document["file"]
    done = slurm.run(script)
    assert done.returncode == 0, done.stderr
    (run,) = runs_of(tiny)
    assert (run.name, run.status()) == ("first", "finished")
    assert run.manifest["layout"]["world_size"] == 2
    assert [line["step"] for line in run.metrics()] == [1, 2]
    logs = tiny.runs / "logs" / "first" / "1234-0"
    for node in range(2):
        assert len(list(logs.glob(f"node-{node}/*/attempt_0/0/stderr.log"))) == 1, "one of each rank"
    again = slurm.run(script, SLURM_RESTART_COUNT="1")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count(f"nothing is left to do: {run.path} is finished") == 1
    assert len(runs_of(tiny)) == 1


@pytest.mark.exhaustive
def test_a_job_at_its_time_limit_saves_and_goes_on_with_the_same_run(tiny: Tiny) -> None:
    document = launched(tiny, "training.train_iters=1000", "training.eval_iters=0", "--slurm")
    slurm = Slurm(tiny.folder / "slurm", 2)
    script = tiny.folder / document["file"]
    process = slurm.start(script)
    try:
        deadline = time.monotonic() + 200
        while not any(len(run.metrics()) > 4 for run in runs_of(tiny)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGUSR1)
        _, errors = process.communicate(timeout=300)
    finally:
        slurm.end(process)
    (run,) = runs_of(tiny)
    assert run.status() == "interrupted", errors
    assert slurm.requeued() == ["1234"]
    saved = max(line["step"] for line in run.metrics())
    assert (run.path / "checkpoints" / f"step-{saved:08d}").is_dir()
    again = slurm.run(script, SLURM_RESTART_COUNT="1")
    assert again.returncode == 0, again.stderr
    (run,) = runs_of(tiny)
    assert run.status() == "finished"
    assert starts(run) == ["start", "resume"]
    assert [event["step"] for event in run.events() if event["kind"] == "resume"] == [saved]
    assert [line["step"] for line in run.metrics()] == list(range(1, 1001))


@pytest.mark.long
def test_the_pods_of_an_indexed_job_train_together(tiny: Tiny) -> None:
    document = launched(
        tiny,
        *("training.train_iters=2", "training.eval_iters=0", "--kubernetes", "--name", "second"),
        *("--container", "image", "--volume", f"runs:{tiny.folder}"),
    )
    manifest = json.loads((tiny.folder / document["file"]).read_text())
    (container,) = manifest["items"][-1]["spec"]["template"]["spec"]["containers"]
    (config_map,) = [item for item in manifest["items"] if item["kind"] == "ConfigMap"]
    add_program(tiny.folder / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    mounted = tiny.folder / "config.toml"
    mounted.write_text(config_map["data"]["config.toml"])
    endpoint = f"127.0.0.1:{free_port()}"
    # What only a cluster has: the names of pods, and a folder of the root.
    here = {"second-0.second:29500": endpoint, "/etc/drivetrain/config.toml": str(mounted)}
    pods = []
    for index in (1, 0):
        given = {
            "POD_NAME": f"second-{index}",
            "JOB_COMPLETION_INDEX": str(index),
            **{variable["name"]: variable["value"] for variable in container["env"] if "value" in variable},
        }
        command = [expanded(word, given) for word in [*container["command"], *container["args"]]]
        for name, place in here.items():
            command = [word.replace(name, place) for word in command]
        pods.append(
            subprocess.Popen(
                command,
                env={**os.environ, "PATH": f"{tiny.folder}:{os.environ['PATH']}", **given},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    try:
        ends = [pod.communicate(timeout=600) for pod in pods]
    finally:
        for pod in pods:
            if pod.poll() is None:
                os.killpg(pod.pid, signal.SIGKILL)
                pod.communicate()
    assert [pod.returncode for pod in pods] == [0, 0], ends
    (run,) = runs_of(tiny)
    assert (run.status(), run.manifest["layout"]["world_size"]) == ("finished", 2)
    for index in range(2):
        assert list(Path(tiny.runs / "logs" / "second" / f"second-{index}").glob("*/attempt_0/0/stderr.log"))


@pytest.mark.long
def test_torchruns_agent_waits_for_a_save_as_long_as_the_job_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.launcher.api import LaunchConfig

    for name, value in job_of(grace_seconds=300).variables().items():
        monkeypatch.setenv(name, value)
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout == 300
