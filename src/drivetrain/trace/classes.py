"""The words of a classification: classes of work, kinds of collectives, labels of process groups."""

__all__ = [
    "CLASSES",
    "CLASS_INDEX",
    "COLLECTIVE_KINDS",
    "COMMUNICATION",
    "COMPUTE",
    "COPIES",
    "GROUP_LABELS",
    "NONE",
    "UNCLASSIFIED",
]

CLASSES: tuple[str, ...] = (
    "none",
    "compute.matmul",
    "compute.attention",
    "compute.norm",
    "compute.activation",
    "compute.elementwise",
    "compute.loss",
    "compute.optimizer",
    "compute.copy_cast",
    "compute.other",
    "communication",
    "copy.h2d",
    "copy.d2h",
    "copy.d2d",
    "copy.offload",
    "copy.memset",
    "copy.other",
    "unclassified",
)
"""Classes of work, by the index stored in ``Classification.kind``. ``none``: no work of a device (or, in a host view,
no leaf operator). ``unclassified``: a kernel no rule knows, on a stream that otherwise carries communication only;
it keeps the device busy and may be either. ``copy.other``: a copy whose direction the record does not tell."""

CLASS_INDEX: dict[str, int] = {name: index for index, name in enumerate(CLASSES)}

NONE = CLASS_INDEX["none"]
COMMUNICATION = CLASS_INDEX["communication"]
UNCLASSIFIED = CLASS_INDEX["unclassified"]
COMPUTE: tuple[int, ...] = tuple(index for index, name in enumerate(CLASSES) if name.startswith("compute."))
COPIES: tuple[int, ...] = tuple(index for index, name in enumerate(CLASSES) if name.startswith("copy."))

COLLECTIVE_KINDS: tuple[str, ...] = (
    "unknown",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "send_recv",
    "barrier",
    "reduce",
    "gather",
    "scatter",
)
"""Kinds of collectives, by the index stored in ``Classification.collective_kind``."""

GROUP_LABELS: tuple[str, ...] = ("unknown", "dp", "tp", "pp", "cp", "ep", "world")
"""What a process group is for, by the index stored in ``Classification.parallel_group``."""
