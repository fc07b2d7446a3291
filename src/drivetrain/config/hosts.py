"""Which rank lies on which machine, and which groups leave one: links inside a machine are the fast ones."""

import itertools
from collections.abc import Sequence

from drivetrain.config.layout import Layout
from drivetrain.config.rules import LaunchFacts

__all__ = ["by_host", "crossing_groups", "host_of", "ranks_per_host", "why_one_level"]


def ranks_per_host(facts: LaunchFacts) -> int:
    """Processes on each machine; torchrun numbers those of a machine one after the other."""
    return facts.local_world_size or facts.world_size


def host_of(rank: int, per_host: int) -> int:
    """Number of the machine of ``rank``."""
    return rank // per_host


def by_host(ranks: Sequence[int], per_host: int) -> list[list[int]]:
    """``ranks``, in ascending order, machine by machine."""
    return [list(those) for _, those in itertools.groupby(ranks, lambda rank: host_of(rank, per_host))]


def why_one_level(layout: Layout, dim: str, per_host: int) -> str | None:
    """Why collectives along ``dim`` cannot go inside machines and between them; None where they can: where each of its
    groups lies on several machines, with equally many ranks on each, and several."""
    for group in layout.groups(dim):
        hosts = by_host(group, per_host)
        sizes = sorted({len(ranks) for ranks in hosts})
        if len(hosts) == 1:
            return f"the ranks of {dim} that communicate are on one machine"
        if sizes == [1]:
            return f"of the ranks of {dim} that communicate, each machine has one"
        if len(sizes) > 1:
            return (
                f"machines have different numbers of the ranks of {dim} that communicate: "
                f"{', '.join(map(str, sizes))}"
            )
    return None


def crossing_groups(layout: Layout, per_host: int) -> list[str]:
    """A warning where tensor-parallel groups lie on several machines, with what would keep them on one."""
    crossing = [
        group for group in layout.groups("tp") if len({host_of(rank, per_host) for rank in group}) > 1
    ]
    if not crossing:
        return []
    shown = ", ".join(map(str, crossing[0][:8])) + (", ..." if len(crossing[0]) > 8 else "")
    if layout.tp > per_host or per_host % layout.tp:
        legal = [size for size in range(1, min(layout.tp, per_host) + 1) if per_host % size == 0]
        remedy = f"tensor_model_parallel_size = {legal[-1]} would stay on a machine of {per_host} processes"
    else:
        remedy = "parallelism.rank_order = tp-cp-pp-dp keeps each of them on one"
    return [
        f"{len(crossing)} of {len(layout.groups('tp'))} tensor-parallel groups lie on several machines (the first is "
        f"{shown}), and they communicate in every layer; {remedy}"
    ]
