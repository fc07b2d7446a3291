"""Manifests for Kubernetes: an Indexed Job with its headless Service, or a PyTorchJob of Kubeflow.

A manifest is a JSON document, which Kubernetes accepts as it does YAML (JSON is a subset of it): there is no YAML
library among our dependencies, and none of YAML's own rules about what a bare word means.

Failed pods are replaced, and torchrun restarts nothing by itself: it numbers its attempts on each host for itself, so
that a pod which is new and one that has restarted its processes would wait for each other under different numbers.
"""

from typing import Any

from drivetrain.errors import DrivetrainError
from drivetrain.launch.job import READ_TIMEOUT_SECONDS, Job
from drivetrain.launch.names import (
    is_on_a_mount,
    require_absolute_path,
    require_claim,
    require_image,
    require_kubernetes_name,
    require_namespace,
)
from drivetrain.launch.quoting import kubernetes_text

__all__ = ["CONFIG_FOLDER", "indexed_job", "pytorch_job"]

CONFIG_FOLDER = "/etc/drivetrain"
"""Where a pod finds the configuration file that came with the job."""

_PORT = 29500
_SHARED_MEMORY = "/dev/shm"

# The first pod serves the rendezvous. It is told so: while it starts, its own name may not resolve yet.
_INDEXED = (
    'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then host=1; else host=0; fi; logs=$1; shift; '
    f'exec python -m torch.distributed.run --rdzv-conf="is_host=$host,read_timeout={READ_TIMEOUT_SECONDS}" '
    '--log-dir="$logs/$POD_NAME" "$@"'
)
_ELASTIC = 'logs=$1; shift; exec python -m torch.distributed.run --log-dir="$logs/$POD_NAME" "$@"'


def indexed_job(job: Job, namespace: str | None = None, config_text: str | None = None) -> dict[str, Any]:
    """A List of the Service that names the pods, the Job, and a ConfigMap where ``config_text`` is given.

    Args:
        config_text: content of the configuration file at ``job.config``.

    Raises:
        DrivetrainError: a name, path or image that Kubernetes would refuse, or storage that ends with a pod.
    """
    _check(job, namespace, f"-{job.nodes - 1}")
    arguments = [
        *job.agent_arguments(),
        "--max-restarts=0",
        f"--rdzv-id={job.name}",
        f"--rdzv-endpoint={job.name}-0.{job.name}:{_PORT}",
        *job.train_arguments(),
    ]
    pod = _pod(job, "train", _INDEXED, arguments, config_text)
    pod.update(subdomain=job.name, restartPolicy="Never")
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, namespace),
        "spec": {
            "clusterIP": "None",
            # The agents look for each other before any of them could be called ready.
            "publishNotReadyAddresses": True,
            "selector": _labels(job),
            "ports": [{"name": "rendezvous", "port": _PORT}],
        },
    }
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, namespace),
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": _backoff_limit(job),
            # Preemption, eviction and a drained node are nobody's failure.
            "podFailurePolicy": {
                "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]
            },
            "template": {"metadata": {"labels": _labels(job)}, "spec": pod},
        },
    }
    return _list(job, namespace, config_text, [service, manifest])


def pytorch_job(job: Job, namespace: str | None = None, config_text: str | None = None) -> dict[str, Any]:
    """A List of a PyTorchJob (kubeflow.org/v1), whose operator makes the Services. As :func:`indexed_job` otherwise."""
    _check(job, namespace, f"-worker-{job.nodes - 1}")
    # Hosts, processes, restarts and rendezvous come from the operator, in variables that torchrun reads.
    pod = _pod(job, "pytorch", _ELASTIC, ["--tee=3", *job.train_arguments()], config_text)
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(job, namespace),
        "spec": {
            "nprocPerNode": str(job.per_node),
            "elasticPolicy": {
                "rdzvBackend": "c10d",
                "rdzvId": job.name,
                "minReplicas": job.nodes,
                "maxReplicas": job.nodes,
                "maxRestarts": 0,
            },
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": _backoff_limit(job)},
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": job.nodes,
                    "restartPolicy": "OnFailure",
                    "template": {"metadata": {"labels": _labels(job)}, "spec": pod},
                }
            },
        },
    }
    return _list(job, namespace, config_text, [manifest])


def _check(job: Job, namespace: str | None, suffix: str) -> None:
    require_kubernetes_name("--name", job.name, suffix)
    if namespace is not None:
        require_namespace(namespace)
    if job.container is None:
        raise DrivetrainError(
            "Kubernetes runs images: give --container IMAGE, one with drivetrain[train] in it"
        )
    require_image(job.container)
    paths = [CONFIG_FOLDER, _SHARED_MEMORY]
    for volume in job.volumes:
        require_claim(volume.source)
        require_absolute_path("--volume", volume.path)
        if volume.path.rstrip("/") in ["", *paths]:
            raise DrivetrainError(f"--volume: {volume.path} is taken by something else; give another path")
        paths.append(volume.path.rstrip("/"))
    if not is_on_a_mount(job.runs_dir, [volume.path for volume in job.volumes]):
        folder = job.volumes[0].path.rstrip("/") if job.volumes else "/data"
        remedy = "" if job.volumes else f"--volume CLAIM:{folder} and "
        raise DrivetrainError(
            f"run.runs_dir = {job.runs_dir} is on no volume, so that what the run saves would end with its pod; give "
            f"{remedy}run.runs_dir={folder}/runs (all pods must be able to write to the claim)"
        )


def _backoff_limit(job: Job) -> int:
    """Failed pods that the job survives: when one fails, the others lose it and fail as well."""
    return job.max_restarts * job.nodes


def _labels(job: Job) -> dict[str, str]:
    return {"app.kubernetes.io/name": "drivetrain", "app.kubernetes.io/instance": job.name}


def _metadata(job: Job, namespace: str | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": job.name, "labels": _labels(job)}
    if namespace is not None:
        metadata["namespace"] = namespace
    return metadata


def _list(
    job: Job, namespace: str | None, config_text: str | None, items: list[dict[str, Any]]
) -> dict[str, Any]:
    if config_text is not None:
        file = job.config.removeprefix(f"{CONFIG_FOLDER}/")
        assert "/" not in file
        config_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _metadata(job, namespace),
            "data": {file: config_text},
        }
        items = [config_map, *items]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _pod(
    job: Job, container: str, start: str, arguments: list[str], config_text: str | None
) -> dict[str, Any]:
    """The pod's specification, but for what only one kind of job has."""
    mounts = [{"name": "shared-memory", "mountPath": _SHARED_MEMORY}]
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if config_text is not None:
        mounts.append({"name": "configuration", "mountPath": CONFIG_FOLDER})
        volumes.append({"name": "configuration", "configMap": {"name": job.name}})
    for number, volume in enumerate(job.volumes):
        mounts.append({"name": f"volume-{number}", "mountPath": volume.path})
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": volume.source}})
    variables = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        *({"name": name, "value": kubernetes_text(value)} for name, value in job.variables().items()),
    ]
    resources: dict[str, Any] = {}
    if job.gpus_per_node:
        resources["limits"] = {"nvidia.com/gpu": str(job.gpus_per_node)}
    if job.cpus_per_node is not None:
        resources["requests"] = {"cpu": str(job.cpus_per_node)}
    return {
        # torchrun takes the shell's place, so that it is the process that Kubernetes asks to stop.
        "terminationGracePeriodSeconds": job.grace_seconds,
        "containers": [
            {
                "name": container,
                "image": job.container,
                "command": ["sh", "-c", kubernetes_text(start), "node"],
                "args": [kubernetes_text(argument) for argument in [job.log_folder, *arguments]],
                "env": variables,
                "resources": resources,
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
