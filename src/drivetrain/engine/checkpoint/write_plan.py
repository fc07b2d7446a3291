"""Which rank writes which part of a tensor: each part once, the bytes spread over the ranks that hold it.

Every rank says what it holds; from the same list each rank comes to the same plan by itself.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from drivetrain.engine.checkpoint.tensor_files import DTYPE_OF, DTYPES, Region, WholeTensor
from drivetrain.engine.parallel.gradient_sync import Held

__all__ = ["WritePlan", "bytes_of", "describe", "plan_writes", "region_of"]


@dataclass(frozen=True)
class WritePlan:
    """What all ranks hold together, and who writes it.

    Attributes:
        whole: every tensor, by name, in the order in which the ranks named them.
        written_by: for each rank the names whose part it writes.
        uncovered: names of tensors of which no rank holds some element.
    """

    whole: Mapping[str, WholeTensor]
    written_by: Sequence[frozenset[str]]
    uncovered: tuple[str, ...]


def region_of(held: Held) -> Region:
    """The part of the whole tensor that is held, as (first, end) for each dimension."""
    return tuple((part.start, part.stop) for part in held.placement.slices())


def describe(tensors: Mapping[str, Held]) -> bytes:
    """What this rank holds, for the other ranks."""
    return json.dumps(
        {
            name: [DTYPES[held.tensor.dtype], list(held.placement.full_shape), region_of(held)]
            for name, held in tensors.items()
        },
        separators=(",", ":"),
    ).encode()


def plan_writes(descriptions: Sequence[bytes]) -> WritePlan:
    """The plan that follows from every rank's :func:`describe`, by rank.

    Of the ranks that hold the same part of a tensor, the one that has least to write so far gets it.
    """
    whole: dict[str, WholeTensor] = {}
    holders: dict[str, dict[Region, list[int]]] = {}
    for rank, description in enumerate(descriptions):
        for name, (dtype, shape, bounds) in json.loads(description).items():
            tensor = WholeTensor(tuple(shape), DTYPE_OF[dtype])
            assert whole.setdefault(name, tensor) == tensor, f"ranks disagree over {name}: {tensor}"
            region = tuple((int(first), int(end)) for first, end in bounds)
            holders.setdefault(name, {}).setdefault(region, []).append(rank)
    load = [0] * len(descriptions)
    written: list[set[str]] = [set() for _ in descriptions]
    uncovered = []
    for name, regions in holders.items():
        for region, ranks in regions.items():
            size = whole[name].dtype.itemsize * prod(end - first for first, end in region)
            if size == 0 and whole[name].shape:
                continue
            writer = min(ranks, key=lambda rank: (load[rank], rank))
            load[writer] += size
            written[writer].add(name)
        if not _cover(list(regions), whole[name].shape):
            uncovered.append(name)
    return WritePlan(whole, [frozenset(names) for names in written], tuple(uncovered))


def _cover(regions: Sequence[Region], shape: tuple[int, ...]) -> bool:
    """Whether every element of a tensor of ``shape`` is in one of ``regions``: on the grid of all their borders."""
    borders = [
        sorted({0, size, *(border for region in regions for border in region[dim])})
        for dim, size in enumerate(shape)
    ]
    held = np.zeros([len(cuts) - 1 for cuts in borders], dtype=bool)
    for region in regions:
        held[
            tuple(
                slice(cuts.index(first), cuts.index(end))
                for cuts, (first, end) in zip(borders, region, strict=True)
            )
        ] = True
    return bool(held.all())


def bytes_of(tensors: Mapping[str, WholeTensor]) -> int:
    """Bytes of all of ``tensors``."""
    return sum(tensor.nbytes for tensor in tensors.values())
