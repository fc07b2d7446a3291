"""The process groups of a layout: torch's ``DeviceMesh`` under the names of :mod:`drivetrain.config.layout`."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drivetrain.config.layout import DIMENSIONS, Layout

__all__ = ["Mesh"]


@dataclass(frozen=True)
class Mesh:
    """This rank's place in a layout and the groups it belongs to. Dimensions of size 1 form no group.

    Attributes:
        layout: the sizes.
        rank: this process.
        device_mesh: torch's mesh over the dimensions larger than 1, outermost first; None for a single process.
    """

    layout: Layout
    rank: int
    device_mesh: DeviceMesh | None

    @staticmethod
    def form(layout: Layout, rank: int, device_type: str = "cpu") -> "Mesh":
        """Form the groups. Collective: every rank of the (initialised) default process group calls it.

        Args:
            device_type: ``cpu`` or ``cuda``, where the tensors are.
        """
        if layout.world_size == 1:
            return Mesh(layout, rank, None)
        assert dist.get_world_size() == layout.world_size, f"{dist.get_world_size()} processes for {layout}"
        names = tuple(name for name in layout.mesh_dimensions if layout.size(name) > 1)
        sizes = tuple(layout.size(name) for name in names)
        device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        if "dp_shard" in names and "dp_replicate" in names:
            device_mesh["dp_replicate", "dp_shard"]._flatten("dp")
        return Mesh(layout, rank, device_mesh)

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
        return self.device_mesh.get_group(names[0]) if len(names) == 1 else self._flattened_group(dim)

    def ranks(self, dim: str) -> list[int]:
        """The ranks of this one's group along ``dim``, in the order of ``dim``; itself alone for size 1."""
        return next(group for group in self.layout.groups(dim) if self.rank in group)

    def _names(self, dim: str) -> tuple[str, ...]:
        """The axes of the device mesh that ``dim`` stands for; dimensions of size 1 have none."""
        assert dim in DIMENSIONS, f"no dimension is called {dim}"
        parts = ("dp_replicate", "dp_shard") if dim == "dp" else (dim,)
        return tuple(part for part in parts if self.layout.size(part) > 1)

    def _flattened_group(self, dim: str) -> dist.ProcessGroup:
        assert self.device_mesh is not None
        return self.device_mesh[dim].get_group()
