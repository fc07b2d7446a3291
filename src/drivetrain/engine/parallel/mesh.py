"""The process groups of a layout: torch's ``DeviceMesh`` under the names of :mod:`drivetrain.config.layout`.

The groups are made here and handed to torch's mesh: those that it makes by itself wait for half an hour, whatever the
run's timeout is, so that a rank that hangs would keep the others for as long.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from drivetrain.config.hosts import by_host, why_one_level
from drivetrain.config.layout import DIMENSIONS, Layout
from drivetrain.engine.parallel.flat_collectives import CountedGroup
from drivetrain.engine.parallel.hierarchy import Hierarchy, LevelGroups
from drivetrain.engine.parallel.traffic import Traffic

__all__ = ["Mesh"]


@dataclass(frozen=True)
class Mesh:
    """This rank's place in a layout and the groups it belongs to. Dimensions of size 1 form no group.

    Attributes:
        layout: the sizes.
        rank: this process.
        device_mesh: torch's mesh over the dimensions larger than 1, outermost first; None for a single process.
        timeout: after which a collective of its groups ends the run; None: torch's own.
    """

    layout: Layout
    rank: int
    device_mesh: DeviceMesh | None
    timeout: timedelta | None = None
    _groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    _hierarchies: Mapping[str, Hierarchy] = field(default_factory=dict)

    @staticmethod
    def form(layout: Layout, rank: int, device_type: str = "cpu", timeout: timedelta | None = None) -> "Mesh":
        """Form the groups. Collective: every rank of the (initialised) default process group calls it.

        Args:
            device_type: ``cpu`` or ``cuda``, where the tensors are.
            timeout: that of the default process group.
        """
        if layout.world_size == 1:
            return Mesh(layout, rank, None)
        assert dist.get_world_size() == layout.world_size, f"{dist.get_world_size()} processes for {layout}"
        names = tuple(name for name in layout.mesh_dimensions if layout.size(name) > 1)
        sizes = tuple(layout.size(name) for name in names)
        groups = {
            name: _own_group(layout.groups(name), rank, timeout, _options(name, device_type, timeout))
            for name in names
        }
        if "dp_shard" in names and "dp_replicate" in names:
            groups["dp"] = _own_group(layout.groups("dp"), rank, timeout)
        places = torch.arange(layout.world_size).view(sizes)
        device_mesh = (
            DeviceMesh.from_group([groups[name] for name in names], device_type, places, mesh_dim_names=names)
            if len(names) > 1
            else DeviceMesh.from_group(groups[names[0]], device_type, mesh_dim_names=names)
        )
        return Mesh(layout, rank, device_mesh, timeout, groups)

    def size(self, dim: str) -> int:
        """Ranks along ``dim`` (tp, cp, pp, dp, dp_shard, dp_replicate)."""
        return self.layout.size(dim)

    def index(self, dim: str) -> int:
        """This rank's place along ``dim``."""
        return self.layout.coordinates(self.rank)[dim]

    @property
    def is_first_of_model(self) -> bool:
        """Whether this rank is the first of those that hold one model, or one replica of it, together."""
        return all(self.index(dim) == 0 for dim in ("tp", "cp", "pp"))

    def submesh(self, *dims: str) -> DeviceMesh | None:
        """Torch's mesh over ``dims``, outermost first, without those of size 1; None where all are."""
        names = tuple(name for dim in dims for name in self._names(dim))
        if self.device_mesh is None or not names:
            return None
        return self.device_mesh[names] if len(names) > 1 else self.device_mesh[names[0]]

    def group(self, dim: str) -> dist.ProcessGroup | None:
        """The group of the ranks that differ from this one in ``dim`` alone; None where ``dim`` has size 1."""
        names = self._names(dim)
        if self.device_mesh is None or not names:
            return None
        return self._groups[names[0] if len(names) == 1 else dim]

    def hierarchy(self, dim: str) -> Hierarchy | None:
        """How the group along ``dim`` communicates in levels; None: it does not. See :meth:`in_levels`."""
        names = self._names(dim)
        return self._hierarchies.get(names[0] if len(names) == 1 else dim) if names else None

    def counted(self, dim: str, traffic: Traffic) -> CountedGroup:
        """The group along ``dim``, whose collectives are counted in ``traffic``; in levels where it has them."""
        return CountedGroup(self.group(dim), dim, traffic, self.hierarchy(dim))

    def in_levels(self, ranks_per_host: int, device: torch.device) -> "Mesh":
        """The same mesh, whose data-parallel groups communicate inside machines and between them, where they lie on
        several with equally many ranks on each, and several. Collective: every rank of the mesh calls it.

        Args:
            ranks_per_host: processes of every machine; those of one are numbered one after the other.
            device: where the tensors are.
        """
        hierarchies = {}
        for dim in ("dp", "dp_shard", "dp_replicate"):
            names = self._names(dim)
            key = names[0] if len(names) == 1 else dim
            if not names or key in hierarchies or why_one_level(self.layout, dim, ranks_per_host) is not None:
                continue
            groups = [by_host(group, ranks_per_host) for group in self.layout.groups(dim)]
            inside = [host for hosts in groups for host in hosts]
            across = [list(ranks) for hosts in groups for ranks in zip(*hosts, strict=True)]
            own = next(hosts for hosts in groups if any(self.rank in host for host in hosts))
            made = LevelGroups(
                inside=_own_group(inside, self.rank, self.timeout),
                inside_again=_own_group(inside, self.rank, self.timeout),
                across=_own_group(across, self.rank, self.timeout),
                hosts=len(own),
                per_host=len(own[0]),
            )
            hierarchies[key] = Hierarchy(dim, made, device)
        return replace(self, _hierarchies=hierarchies)

    def ranks(self, dim: str) -> list[int]:
        """The ranks of this one's group along ``dim``, in the order of ``dim``; itself alone for size 1."""
        return next(group for group in self.layout.groups(dim) if self.rank in group)

    def _names(self, dim: str) -> tuple[str, ...]:
        """The axes of the device mesh that ``dim`` stands for; dimensions of size 1 have none."""
        assert dim in DIMENSIONS, f"no dimension is called {dim}"
        parts = ("dp_replicate", "dp_shard") if dim == "dp" else (dim,)
        return tuple(part for part in parts if self.layout.size(part) > 1)


def _options(dim: str, device_type: str, timeout: timedelta | None) -> Any:
    """What NCCL is told of the group along ``dim``; None: nothing.

    Tensor parallelism waits in every layer, data parallelism once a step: where both have something to send, a stream
    of high priority goes first. A gloo group has threads and connections of its own, and no order with other groups.
    """
    if dim != "tp" or device_type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        # Torch warns where it differs from the group's.
        options._timeout = timeout
    return options


def _own_group(
    groups: list[list[int]], rank: int, timeout: timedelta | None, options: Any = None
) -> dist.ProcessGroup:
    """The one of ``groups`` that ``rank`` is in. Every rank makes all of them, in the same order."""
    own: dist.ProcessGroup | None = None
    for ranks in groups:
        # The group of all ranks is there already, and each more costs connections between all of them.
        made = (
            dist.group.WORLD
            if ranks == list(range(dist.get_world_size()))
            else dist.new_group(ranks, timeout=timeout, pg_options=options)
        )
        if rank in ranks:
            own = made
    assert own is not None, f"rank {rank} is in none of {groups}"
    return own
