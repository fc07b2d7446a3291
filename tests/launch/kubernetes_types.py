"""The fields of Kubernetes' and Kubeflow's types that our manifests may use: name, type, and whether it must be there.

Written by hand from the API reference: Job v1 batch, Service v1 core, ConfigMap v1 core, PodSpec and Container v1 core,
and kubeflow.org/v1. A field that is not listed here is refused, so that a misspelt one is found as the server finds it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LIST", "expanded", "faults"]

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class Fields:
    """An object with exactly these fields."""

    required: Mapping[str, "Type"]
    optional: Mapping[str, "Type"]


@dataclass(frozen=True)
class ListOf:
    """A list of one type; with ``at_least`` elements."""

    item: "Type"
    at_least: int = 0


@dataclass(frozen=True)
class MapOf:
    """An object of any keys that match."""

    key: Check
    value: "Type"


@dataclass(frozen=True)
class ByKind:
    """An object whose apiVersion and kind say what else it has."""

    kinds: Mapping[tuple[str, str], "Type"]


Type = Fields | ListOf | MapOf | ByKind | Check


def faults(value: Any, wanted: Type, where: str = "") -> list[str]:
    """What of ``value`` its type does not allow."""
    if isinstance(wanted, ByKind):
        kind = (value.get("apiVersion"), value.get("kind"))
        if kind not in wanted.kinds:
            return [f"{where}: no such kind {kind}"]
        return faults(value, wanted.kinds[kind], f"{where}{kind[1]}")
    if isinstance(wanted, Fields):
        if not isinstance(value, dict):
            return [f"{where}: {value!r} is no object"]
        known = {**wanted.required, **wanted.optional}
        return [
            *(f"{where}.{name} is missing" for name in wanted.required if name not in value),
            *(f"{where}.{name} is unknown" for name in value if name not in known),
            *(
                fault
                for name, item in value.items()
                if name in known
                for fault in faults(item, known[name], f"{where}.{name}")
            ),
        ]
    if isinstance(wanted, ListOf):
        if not isinstance(value, list) or len(value) < wanted.at_least:
            return [f"{where}: {value!r} is no list of at least {wanted.at_least}"]
        return [
            fault
            for number, item in enumerate(value)
            for fault in faults(item, wanted.item, f"{where}[{number}]")
        ]
    if isinstance(wanted, MapOf):
        if not isinstance(value, dict):
            return [f"{where}: {value!r} is no object"]
        return [
            *(f"{where}: {key!r} is no key here" for key in value if not wanted.key(key)),
            *(
                fault
                for key, item in value.items()
                for fault in faults(item, wanted.value, f"{where}[{key}]")
            ),
        ]
    return [] if wanted(value) else [f"{where}: {value!r} is not legal"]


def text(value: Any) -> bool:
    return isinstance(value, str)


def truth(value: Any) -> bool:
    return isinstance(value, bool)


def count(value: Any) -> bool:
    """int32, not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def matching(pattern: str, longest: int) -> Check:
    return lambda value: (
        isinstance(value, str) and len(value) <= longest and re.fullmatch(pattern, value) is not None
    )


def one_of(*values: str) -> Check:
    return lambda value: value in values


LABEL = matching(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", 63)
SERVICE_NAME = matching(r"[a-z]([-a-z0-9]*[a-z0-9])?", 63)
SUBDOMAIN = matching(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", 253)
LABEL_VALUE = matching(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", 63)
LABEL_KEY = matching(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", 317)
QUANTITY = matching(r"[0-9]+(\.[0-9]+)?(m|k|Ki|Mi|Gi|M|G)?", 40)
PORT_NAME = matching(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", 15)
MOUNT_PATH = matching(r"/[^:]*", 4096)
CONFIG_KEY = matching(r"[-._a-zA-Z0-9]+", 253)
VARIABLE = matching(r"[-._a-zA-Z][-._a-zA-Z0-9]*", 253)

LABELS = MapOf(LABEL_KEY, LABEL_VALUE)
METADATA = Fields({"name": SUBDOMAIN}, {"namespace": LABEL, "labels": LABELS})
RESOURCES = MapOf(LABEL_KEY, QUANTITY)


def _one_source(value: Any) -> bool:
    """A variable has a value or a field of the pod, not both."""
    return ("value" in value) != ("valueFrom" in value)


VARIABLE_TYPE = Fields(
    {"name": VARIABLE},
    {
        "value": text,
        "valueFrom": Fields({"fieldRef": Fields({"fieldPath": one_of("metadata.name")}, {})}, {}),
    },
)
CONTAINER = Fields(
    {"name": LABEL},
    {
        "image": text,
        "command": ListOf(text, 1),
        "args": ListOf(text),
        "env": ListOf(VARIABLE_TYPE),
        "resources": Fields({}, {"limits": RESOURCES, "requests": RESOURCES}),
        "volumeMounts": ListOf(Fields({"name": LABEL, "mountPath": MOUNT_PATH}, {})),
    },
)
VOLUME = Fields(
    {"name": LABEL},
    {
        "emptyDir": Fields({}, {"medium": one_of("", "Memory"), "sizeLimit": QUANTITY}),
        "configMap": Fields({"name": SUBDOMAIN}, {}),
        "persistentVolumeClaim": Fields({"claimName": SUBDOMAIN}, {}),
    },
)
POD = Fields(
    {"containers": ListOf(CONTAINER, 1)},
    {
        "restartPolicy": one_of("Always", "OnFailure", "Never"),
        "subdomain": LABEL,
        "terminationGracePeriodSeconds": count,
        "volumes": ListOf(VOLUME),
    },
)
TEMPLATE = Fields({"spec": POD}, {"metadata": Fields({}, {"labels": LABELS})})
POLICY = Fields(
    {
        "rules": ListOf(
            Fields(
                {"action": one_of("Ignore", "FailJob", "Count", "FailIndex")},
                {"onPodConditions": ListOf(Fields({"type": text}, {"status": text}), 1)},
            ),
            1,
        )
    },
    {},
)

SERVICE = Fields(
    {
        "apiVersion": one_of("v1"),
        "kind": one_of("Service"),
        "metadata": Fields({"name": SERVICE_NAME}, {"namespace": LABEL, "labels": LABELS}),
        "spec": Fields(
            {"ports": ListOf(Fields({"port": count}, {"name": PORT_NAME}), 1)},
            {"clusterIP": one_of("None"), "publishNotReadyAddresses": truth, "selector": LABELS},
        ),
    },
    {},
)
JOB = Fields(
    {
        "apiVersion": one_of("batch/v1"),
        "kind": one_of("Job"),
        "metadata": METADATA,
        "spec": Fields(
            {"template": TEMPLATE},
            {
                "completionMode": one_of("Indexed", "NonIndexed"),
                "completions": count,
                "parallelism": count,
                "backoffLimit": count,
                "podFailurePolicy": POLICY,
            },
        ),
    },
    {},
)
CONFIG_MAP = Fields(
    {
        "apiVersion": one_of("v1"),
        "kind": one_of("ConfigMap"),
        "metadata": METADATA,
        "data": MapOf(CONFIG_KEY, text),
    },
    {},
)
PYTORCH_JOB = Fields(
    {
        "apiVersion": one_of("kubeflow.org/v1"),
        "kind": one_of("PyTorchJob"),
        "metadata": METADATA,
        "spec": Fields(
            {
                "pytorchReplicaSpecs": Fields(
                    {},
                    {
                        "Worker": Fields(
                            {"template": TEMPLATE},
                            {
                                "replicas": count,
                                "restartPolicy": one_of("Always", "OnFailure", "Never", "ExitCode"),
                            },
                        )
                    },
                )
            },
            {
                "nprocPerNode": matching("auto|cpu|gpu|[1-9][0-9]*", 10),
                "elasticPolicy": Fields(
                    {},
                    {
                        "rdzvBackend": one_of("c10d", "etcd", "etcd-v2"),
                        "rdzvId": text,
                        "minReplicas": count,
                        "maxReplicas": count,
                        "maxRestarts": count,
                    },
                ),
                "runPolicy": Fields(
                    {}, {"cleanPodPolicy": one_of("All", "Running", "None"), "backoffLimit": count}
                ),
            },
        ),
    },
    {},
)
LIST = Fields(
    {
        "apiVersion": one_of("v1"),
        "kind": one_of("List"),
        "items": ListOf(
            ByKind(
                {
                    ("v1", "Service"): SERVICE,
                    ("v1", "ConfigMap"): CONFIG_MAP,
                    ("batch/v1", "Job"): JOB,
                    ("kubeflow.org/v1", "PyTorchJob"): PYTORCH_JOB,
                }
            ),
            1,
        ),
    },
    {},
)


def expanded(value: str, variables: Mapping[str, str]) -> str:
    """What a container gets for ``value``: ``$(NAME)`` is replaced where NAME is set, ``$$`` is one ``$``."""

    def replaced(found: "re.Match[str]") -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, value)
