"""What part of a whole parameter a rank holds: plain data, beside plain tensors.

A parameter on a rank is an ordinary ``nn.Parameter``. Its :class:`Placement` says where its values lie in the tensor
a single process would hold, which is what a checkpoint, a comparison and a norm over all ranks need to know.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

__all__ = ["Placement", "Shard", "even_shard"]


@dataclass(frozen=True)
class Shard:
    """This rank's rows ``[offset, offset + length)`` of a whole dimension; the rest is on the ranks of ``group``.

    Attributes:
        group: dimension of the mesh along which the parts lie ("tp", "dp_shard", ...).
        dim: dimension of the tensor.
        offset, length: in elements of that dimension of the *whole* tensor.
        replica: where several ranks of ``group`` hold this very part (a head of keys that several ranks of queries
            read), this rank's number among them; number 0 counts in a norm.
    """

    group: str
    dim: int
    offset: int
    length: int
    replica: int = 0

    def __post_init__(self) -> None:
        assert self.dim >= 0, "dimensions are counted from the first"
        assert self.offset >= 0
        assert self.length >= 0
        assert self.replica >= 0


@dataclass(frozen=True)
class Placement:
    """Where the values of a rank's tensor lie in the whole one.

    Attributes:
        full_shape: shape of the whole tensor, as a single process holds it.
        shards: the cuts. Two cuts of one dimension are both in whole coordinates, and their intersection is held:
            tensor parallelism cuts first, a shard over data-parallel ranks cuts what is left.
        replicated: dimensions of the mesh on which every rank of a group holds the same values. Of these ranks one
            must count in a norm. "dp" stands for both of its parts.
    """

    full_shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    replicated: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        for shard in self.shards:
            assert shard.dim < len(self.full_shape), f"{shard} of shape {self.full_shape}"
            assert shard.offset + shard.length <= self.full_shape[shard.dim], f"{shard} of {self.full_shape}"
            assert shard.group not in self.replicated, f"{shard.group} both cuts and replicates"

    def slices(self) -> tuple[slice, ...]:
        """The part of the whole tensor that this rank holds, one slice for each dimension."""
        first = [0] * len(self.full_shape)
        last = list(self.full_shape)
        for shard in self.shards:
            first[shard.dim] = max(first[shard.dim], shard.offset)
            last[shard.dim] = min(last[shard.dim], shard.offset + shard.length)
        return tuple(slice(low, max(low, high)) for low, high in zip(first, last, strict=True))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what this rank holds."""
        return tuple(part.stop - part.start for part in self.slices())

    @property
    def sharded_over(self) -> frozenset[str]:
        """Dimensions of the mesh over which the whole tensor is spread."""
        return frozenset(shard.group for shard in self.shards)

    def cut(self, *shards: Shard) -> "Placement":
        """The same tensor, cut further."""
        groups = {shard.group for shard in shards}
        return replace(self, shards=(*self.shards, *shards), replicated=self.replicated - groups)

    def replicated_over(self, *groups: str) -> "Placement":
        """The same tensor, known to be held alike along ``groups`` too."""
        return replace(self, replicated=self.replicated | set(groups))


def even_shard(group: str, dim: int, shape: Sequence[int], index: int, parts: int) -> Shard:
    """Part ``index`` of ``parts`` equal parts of dimension ``dim``, which ``parts`` must divide."""
    assert shape[dim] % parts == 0, f"{parts} do not divide dimension {dim} of {tuple(shape)}"
    length = shape[dim] // parts
    return Shard(group, dim, index * length, length)
