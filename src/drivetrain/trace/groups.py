"""What a process group is for: data, tensor, pipeline, context or expert parallelism, or all ranks.

A group's description or name decides where trainers give one (Megatron's ``TENSOR_MODEL_PARALLEL_GROUP``, the
``mesh_dp_shard`` of device meshes, vLLM's ``tp``). Else its ranks do: all ranks of the job are ``world``, and where
the layout is known a set of ranks that differ in one dimension only serves that dimension. Without either it stays
``unknown``: the same set of contiguous ranks is tensor parallel in one job and a sharding group in the next.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.trace.classes import GROUP_LABELS
from drivetrain.trace.name_table import NameTable

__all__ = ["ProcessGroup", "group_label", "label_of_ranks", "labels_of_groups", "process_groups"]


@dataclass(frozen=True)
class ProcessGroup:
    """One process group as the profiler recorded it."""

    name: str
    description: str
    """``default_pg``, ``mesh_tp``, …; empty where the trainer gave none."""
    ranks: tuple[int, ...]
    """Global ranks, empty where not recorded."""
    size: int | None


def process_groups(metadata: Mapping[str, Any]) -> tuple[ProcessGroup, ...]:
    """The groups of ``distributedInfo.pg_config``; empty where the file has none.

    Profilers write it as a list of objects; entries that are no objects are passed over.
    """
    info = metadata.get("distributedInfo")
    entries = info.get("pg_config") if isinstance(info, Mapping) else None
    if not isinstance(entries, list):
        return ()
    groups = []
    for entry in entries:
        if not isinstance(entry, Mapping):
            continue
        description = str(entry.get("pg_desc") or "")
        size = entry.get("pg_size", entry.get("group_size"))
        groups.append(
            ProcessGroup(
                name=str(entry.get("pg_name", "")),
                description="" if description == "undefined" else description,
                ranks=_ranks(entry.get("ranks")),
                size=size if isinstance(size, int) else None,
            )
        )
    return tuple(groups)


def _ranks(value: object) -> tuple[int, ...]:
    if isinstance(value, list) and all(isinstance(rank, int) for rank in value):
        return tuple(sorted(value))
    return ()


def label_of_ranks(ranks: Sequence[int], world_size: int, layout: Mapping[str, int] | None = None) -> str:
    """What a set of ranks serves.

    Args:
        ranks: global ranks of the group.
        world_size: ranks of the job.
        layout: size of each parallel dimension, the fastest varying first, as Megatron orders ranks by default:
            ``{"tp": 2, "cp": 1, "dp": 4, "pp": 2}``. Keys are labels; the sizes multiply to ``world_size``.

    Returns:
        A label of ``GROUP_LABELS``; ``unknown`` for a single rank and wherever the ranks do not tell.
    """
    wanted = tuple(sorted(ranks))
    if len(wanted) < 2:
        return "unknown"
    if layout is not None:
        assert set(layout) <= set(GROUP_LABELS), f"labels of a layout: {GROUP_LABELS}"
        for label, members in _groups_of_layout(layout).items():
            if wanted in members:
                return label
    return "world" if wanted == tuple(range(world_size)) else "unknown"


def _groups_of_layout(layout: Mapping[str, int]) -> dict[str, set[tuple[int, ...]]]:
    """Label → its groups, each a sorted tuple of ranks."""
    stride = 1
    strides = {}
    for label, size in layout.items():
        strides[label] = stride
        stride *= size
    groups = {}
    for label, size in layout.items():
        others = [range(layout[other]) for other in layout if other != label]
        steps = [strides[other] for other in layout if other != label]
        groups[label] = {
            tuple(sum(map(int.__mul__, place, steps)) + i * strides[label] for i in range(size))
            for place in itertools.product(*others)
        }
    return {label: members for label, members in groups.items() if layout[label] > 1}


def group_label(
    group: ProcessGroup, table: NameTable, world_size: int | None, layout: Mapping[str, int] | None = None
) -> str:
    """Label of one process group: by description, then by name, then by ranks."""
    by_word = "unknown"
    for word in (group.description, group.name):
        if word and not word.isdigit() and by_word == "unknown":
            by_word = table.label("group", word) or "unknown"
    if by_word not in ("unknown", "world"):
        return by_word
    if world_size is not None and group.ranks:
        by_ranks = label_of_ranks(group.ranks, world_size, layout)
        if by_ranks != "unknown":
            return by_ranks
    if by_word == "unknown" and group.size is not None and group.size == world_size and world_size > 1:
        return "world"
    return by_word


def labels_of_groups(
    texts: Sequence[str],
    metadata: Mapping[str, Any],
    table: NameTable,
    world_size: int | None,
    layout: Mapping[str, int] | None = None,
) -> tuple[list[str], str]:
    """Labels of the groups an event table names.

    Args:
        texts: ``EventTable.groups``, each ``name|description``.
        metadata: ``Trace.metadata``.
        table: name tables.
        world_size: ranks of the job, None where unknown.
        layout: see :func:`label_of_ranks`.

    Returns:
        A label for each text, and the label of records that name no group: that of the job's only group where it
        has just one, else ``unknown``.
    """
    known = process_groups(metadata)
    by_name = {group.name: group for group in known if group.name}
    labels = []
    for text in texts:
        name, _, description = text.partition("|")
        recorded = by_name.get(name)
        description = "" if description == "undefined" else description
        if recorded is None:
            group = ProcessGroup(name, description, (), None)
        else:
            group = ProcessGroup(name, description or recorded.description, recorded.ranks, recorded.size)
        labels.append(group_label(group, table, world_size, layout))
    single = group_label(known[0], table, world_size, layout) if len(known) == 1 else "unknown"
    return labels, single
