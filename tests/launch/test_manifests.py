"""Manifests are what the API's types allow, and start what was asked for."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_samples import ANY_TEXT, job_of
from kubernetes_types import LIST, expanded, faults
from scheduler_programs import add_program

from drivetrain.errors import DrivetrainError
from drivetrain.launch import Job, Volume, indexed_job, pytorch_job
from drivetrain.launch.kubernetes import CONFIG_FOLDER

WRITERS = {"indexed": indexed_job, "pytorchjob": pytorch_job}
JOBS = {
    "eight GPUs": job_of(),
    "CPUs": job_of(gpus_per_node=0, cpus_per_node=3, nodes=1, max_restarts=0),
    "everything": job_of(
        nodes=100,
        config=f"{CONFIG_FOLDER}/config.toml",
        cpus_per_node=64,
        volumes=(Volume("runs", "/data"), Volume("a.corpus-1", "/corpus")),
        environment={"NCCL_DEBUG": "WARN", "odd": "$(HOME)"},
    ),
}


def written(kind: str, job: Job) -> dict[str, Any]:
    has_file = job.config.startswith("/")
    manifest = WRITERS[kind](job, "team" if has_file else None, "[model]\n" if has_file else None)
    read: dict[str, Any] = json.loads(json.dumps(manifest))
    return read


def item(manifest: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = [one for one in manifest["items"] if one["kind"] == kind]
    return dict(found)


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    job = manifest["items"][-1]["spec"]
    template = job["template"] if "template" in job else job["pytorchReplicaSpecs"]["Worker"]["template"]
    return dict(template["spec"])


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", JOBS)
def test_every_field_is_one_that_the_api_knows(kind: str, name: str) -> None:
    assert faults(written(kind, JOBS[name]), LIST) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("items", 1, "spec", "completion"), 2),
        (("items", 1, "spec", "completions"), "2"),
        (("items", 1, "spec", "template", "spec", "containers", 0, "image"), None),
        (("items", 1, "spec", "template", "spec", "restartPolicy"), "never"),
        (("items", 0, "metadata", "name"), "1st"),
        (("items", 0, "kind"), "Services"),
    ],
)
def test_the_types_find_what_a_server_would_refuse(path: tuple[Any, ...], value: Any) -> None:
    manifest = written("indexed", job_of())
    place: Any = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert len(faults(manifest, LIST)) == 1


@pytest.mark.parametrize("name", JOBS)
def test_pods_are_named_by_the_service_and_mount_what_they_have(name: str) -> None:
    job = JOBS[name]
    manifest = written("indexed", job)
    service, batch = item(manifest, "Service"), item(manifest, "Job")
    assert pod_of(manifest)["subdomain"] == service["metadata"]["name"] == job.name
    labels = batch["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert batch["spec"]["completions"] == batch["spec"]["parallelism"] == job.nodes
    assert batch["spec"]["backoffLimit"] == job.max_restarts * job.nodes
    (policy,) = batch["spec"]["podFailurePolicy"]["rules"]
    assert (policy["action"], policy["onPodConditions"]) == ("Ignore", [{"type": "DisruptionTarget"}])
    assert pod_of(manifest)["restartPolicy"] == "Never", "podFailurePolicy works with no other"


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", JOBS)
def test_a_pod_has_its_resources_and_volumes(kind: str, name: str) -> None:
    job = JOBS[name]
    manifest = written(kind, job)
    pod = pod_of(manifest)
    (container,) = pod["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    assert mounted["shared-memory"] == "/dev/shm"
    claims = {
        mounted[volume["name"]]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {volume.path: volume.source for volume in job.volumes}
    limits = container["resources"].get("limits", {})
    assert limits == ({"nvidia.com/gpu": str(job.gpus_per_node)} if job.gpus_per_node else {})
    assert pod["terminationGracePeriodSeconds"] == 120
    if job.config.startswith("/"):
        config_map = item(manifest, "ConfigMap")
        (file,) = config_map["data"]
        assert f"{mounted['configuration']}/{file}" == job.config
        assert {one["metadata"]["namespace"] for one in manifest["items"]} == {"team"}


def test_a_pytorch_job_has_as_many_workers_as_the_operator_waits_for() -> None:
    spec = item(written("pytorchjob", JOBS["everything"]), "PyTorchJob")["spec"]
    assert spec["nprocPerNode"] == "4"
    assert spec["elasticPolicy"]["minReplicas"] == spec["elasticPolicy"]["maxReplicas"] == 100
    assert spec["elasticPolicy"]["maxRestarts"] == 0, "pods are replaced instead"
    assert spec["runPolicy"]["backoffLimit"] == 300
    assert spec["pytorchReplicaSpecs"]["Worker"]["replicas"] == 100
    assert pod_of(written("pytorchjob", job_of()))["containers"][0]["name"] == "pytorch", (
        "the operator looks for it"
    )


PYTHON = """#!/bin/sh
printf '%s\\0' "$@" > "$NOTED"
printf '%s\\0' "$ODD" > "$NOTED.odd"
"""


def start_pod(
    manifest: dict[str, Any], programs: Path, index: int, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run the container's command as kubelet does: variables first, then what refers to them."""
    (container,) = pod_of(manifest)["containers"]
    given = {"POD_NAME": f"first-3f2a-{index}-x7k2p", "JOB_COMPLETION_INDEX": str(index), **variables}
    for variable in container["env"]:
        if "value" in variable:
            given[variable["name"]] = expanded(variable["value"], given)
    command = [expanded(word, given) for word in [*container["command"], *container["args"]]]
    return subprocess.run(
        command,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **given},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.parametrize("kind", WRITERS)
def test_any_override_and_variable_arrives_in_the_container_unchanged(kind: str, tmp_path: Path) -> None:
    add_program(tmp_path / "python", PYTHON)

    @given(st.lists(ANY_TEXT, min_size=1, max_size=4), ANY_TEXT)
    def arrives(overrides: list[str], variable: str) -> None:
        manifest = written(kind, job_of(overrides=tuple(overrides), environment={"ODD": variable}))
        done = start_pod(manifest, tmp_path, 0, NOTED=str(tmp_path / "noted"))
        assert done.returncode == 0, done.stderr
        words = (tmp_path / "noted").read_bytes().decode().split("\0")[:-1]
        begin = words.index("train")
        assert words[begin - 2 : begin] == ["-m", "drivetrain"]
        assert words[begin + 1 :] == ["llama-2m", *overrides, "--resume"]
        assert (tmp_path / "noted.odd").read_bytes().decode() == f"{variable}\0"

    arrives()


@pytest.mark.parametrize("index", [0, 1])
def test_the_first_pod_serves_the_rendezvous_and_each_logs_by_its_name(index: int, tmp_path: Path) -> None:
    add_program(tmp_path / "python", PYTHON)
    start_pod(written("indexed", job_of()), tmp_path, index, NOTED=str(tmp_path / "noted"))
    words = (tmp_path / "noted").read_text().split("\0")
    assert words[:2] == ["-m", "torch.distributed.run"]
    assert f"--rdzv-conf=is_host={1 - index},read_timeout=600" in words
    assert f"--log-dir=/data/runs/logs/first-3f2a/first-3f2a-{index}-x7k2p" in words
    assert "--rdzv-endpoint=first-3f2a-0.first-3f2a:29500" in words
    assert {"--nnodes=2", "--nproc-per-node=4", "--max-restarts=0"} <= set(words)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "First"}, "'first' would do"),
        ({"name": "r" * 63}, "at most"),
        ({"container": None}, "give --container"),
        ({"container": "a b"}, "no image"),
        ({"volumes": ()}, "give --volume CLAIM:/data and run.runs_dir=/data/runs"),
        ({"runs_dir": "runs"}, "on no volume"),
        ({"runs_dir": "/database/runs"}, "on no volume"),
        ({"runs_dir": "/data/../tmp"}, "on no volume"),
        ({"volumes": (Volume("Training", "/data"),)}, "'training' would do"),
        ({"volumes": (Volume("a", "/data"), Volume("b", "/data/"))}, "taken by something else"),
        ({"volumes": (Volume("a", "/"),)}, "taken by something else"),
        ({"volumes": (Volume("a", CONFIG_FOLDER),)}, "taken by something else"),
    ],
)
def test_what_a_cluster_would_refuse_or_lose_is_refused(
    kind: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(DrivetrainError, match=re.escape(words)):
        WRITERS[kind](job_of(**changes))
    with pytest.raises(DrivetrainError, match="--namespace"):
        WRITERS[kind](job_of(), "My_Team")
