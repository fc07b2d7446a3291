"""Which ranks work together: every dimension of parallelism as arithmetic on rank numbers, without a process.

Ranks are numbered along the dimensions of ``order``, the innermost first: with ``tp-cp-pp-dp`` neighbours share a
layer (tensor parallelism talks most and wants the fastest links), and data-parallel ranks lie furthest apart. The
data-parallel dimension is itself two: ``dp_shard``, ranks that share one set of shards, inside ``dp_replicate``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain.config.schema import RunConfig
from drivetrain.config.stages import StagePlan, layers_of_text, plan_stages

__all__ = [
    "DIMENSIONS",
    "ORDER",
    "Layout",
    "is_order",
    "layout_of",
    "least_processes",
    "model_ranks",
    "stage_plan",
]

ORDER = ("tp", "cp", "pp", "dp")
"""The order of dimensions, innermost first, unless another is asked for."""

DIMENSIONS = ("tp", "cp", "pp", "dp", "dp_shard", "dp_replicate")
"""Every dimension a layout has a coordinate and groups for."""


def is_order(text: str) -> bool:
    """Whether ``text`` names each dimension once, like ``tp-cp-pp-dp``."""
    return sorted(text.split("-")) == sorted(ORDER)


@dataclass(frozen=True)
class Layout:
    """Sizes of the dimensions, and how ranks are numbered along them.

    Attributes:
        tp, cp, pp, dp: ranks along each dimension; their product is the number of processes.
        dp_shard: data-parallel ranks that share one set of shards, a divisor of ``dp``; None: all of them.
        order: the dimensions, innermost first.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    dp_shard: int | None = None
    order: tuple[str, ...] = ORDER

    def __post_init__(self) -> None:
        assert min(self.tp, self.cp, self.pp, self.dp) >= 1, f"a dimension of {self} is empty"
        assert self.dp % self.size("dp_shard") == 0, f"dp_shard does not divide dp in {self}"
        assert sorted(self.order) == sorted(ORDER), f"{self.order} is no permutation of {ORDER}"

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tp * self.cp * self.pp * self.dp

    def size(self, dim: str) -> int:
        """Ranks along ``dim``, one of :data:`DIMENSIONS`."""
        if dim == "dp_shard":
            return self.dp if self.dp_shard is None else self.dp_shard
        if dim == "dp_replicate":
            return self.dp // self.size("dp_shard")
        assert dim in ORDER, f"no dimension is called {dim}"
        return {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.dp}[dim]

    @property
    def mesh_dimensions(self) -> tuple[str, ...]:
        """The dimensions that have no parts, outermost first: the axes of a mesh in row-major order."""
        inner_first: list[str] = []
        for dim in self.order:
            inner_first += ["dp_shard", "dp_replicate"] if dim == "dp" else [dim]
        return tuple(reversed(inner_first))

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """The place of ``rank`` along every one of :data:`DIMENSIONS`."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        place: dict[str, int] = {}
        for dim in self.order:
            rank, place[dim] = divmod(rank, self.size(dim))
        place["dp_replicate"], place["dp_shard"] = divmod(place["dp"], self.size("dp_shard"))
        return place

    def rank_of(self, place: Mapping[str, int]) -> int:
        """The rank at ``place``, which has at least tp, cp, pp and dp: the inverse of :meth:`coordinates`."""
        rank = 0
        for dim in reversed(self.order):
            assert 0 <= place[dim] < self.size(dim), f"{dim} = {place[dim]} of {self.size(dim)}"
            rank = rank * self.size(dim) + place[dim]
        return rank

    def groups(self, dim: str) -> list[list[int]]:
        """The ranks that differ in ``dim`` alone, group by group; within a group in the order of ``dim``."""
        parts = {"dp": ("dp_shard", "dp_replicate")}.get(dim, (dim,))
        fixed = [name for name in self.mesh_dimensions if name not in parts]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            found.setdefault(tuple(place[name] for name in fixed), []).append(rank)
        groups = [sorted(group, key=lambda rank: self.coordinates(rank)[dim]) for group in found.values()]
        assert all(len(group) == self.size(dim) for group in groups)
        assert math.prod((len(groups), self.size(dim))) == self.world_size
        return groups


def model_ranks(config: RunConfig) -> int:
    """Ranks that hold one copy of the model together: processes of each data-parallel rank."""
    parallelism = config.parallelism
    return parallelism.tensor_model_parallel_size * parallelism.pipeline_model_parallel_size


def stage_plan(config: RunConfig) -> StagePlan:
    """Which layers lie on which rank of the pipeline.

    Raises:
        ConfigurationError: the rule pipeline-stages-hold-the-layers is broken.
    """
    parallelism = config.parallelism
    text = parallelism.pipeline_model_parallel_layout
    return plan_stages(
        config.model.num_layers,
        parallelism.pipeline_model_parallel_size,
        parallelism.pipeline_schedule,
        parallelism.virtual_pipeline_model_parallel_size,
        None if text is None else layers_of_text(text),
    )


def least_processes(config: RunConfig) -> int:
    """Processes that the configuration asks for by itself: its sizes, with 1 for an absent data-parallel size."""
    return model_ranks(config) * (config.parallelism.data_parallel_size or 1)


def layout_of(config: RunConfig, world_size: int) -> Layout:
    """The layout of ``world_size`` processes. The rules must hold."""
    parallelism = config.parallelism
    assert world_size % model_ranks(config) == 0, "rule layout-covers-processes was not checked"
    return Layout(
        tp=parallelism.tensor_model_parallel_size,
        pp=parallelism.pipeline_model_parallel_size,
        dp=world_size // model_ranks(config),
        dp_shard=parallelism.hybrid_shard_size if parallelism.zero_stage else None,
        order=tuple(parallelism.rank_order.split("-")),
    )
