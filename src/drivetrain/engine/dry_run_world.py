"""A world by the formulas: which ranks are alike, what each holds and hands over, what all hold together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from drivetrain.config import RunConfig
from drivetrain.config.layout import Layout, layout_of
from drivetrain.engine.devices import Device
from drivetrain.engine.dry_run_formulas import Amount, Formulas, Resident, Shape, Traffic
from drivetrain.engine.dry_run_placements import PlannedModel
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimisations.in_effect import Optimisations
from drivetrain.engine.parallel.buckets import rows_of_part
from drivetrain.engine.parallel.placement import Placement, Shard

__all__ = ["PlannedWorld", "choices_of"]


def choices_of(config: RunConfig, world_size: int) -> Building:
    """What the optimisations of a run choose before anything is built, on a CPU."""
    device = Device("cpu", "dry run", torch.device("cpu"), 1)
    building = Building(config=config, device=device, num_ranks=world_size)
    Optimisations(building).prepare("choices")
    return building


@dataclass
class _Kind:
    """Ranks at some (tp, pp) that are alike but for their places along the data-parallel dimensions."""

    first: tuple[int, int]
    shapes: Mapping[Shape, int]
    places: int = 0


@dataclass(frozen=True)
class PlannedWorld:
    """Ranks are of one kind if their parameters have equal shapes and they hand over equal bytes, but for what their
    places along the data-parallel dimensions make of that.

    Attributes:
        layout: the sizes.
    """

    formulas: Formulas
    layout: Layout

    @staticmethod
    def of(config: RunConfig, world_size: int) -> "PlannedWorld":
        """That of ``config`` on ``world_size`` processes."""
        layout = layout_of(config, world_size)
        choices = choices_of(config, world_size)
        # As the model is built: in a pipeline buckets hide nothing, and bound memory alone.
        bucket_size_mb = config.overlap.bucket_size_mb if layout.pp > 1 else choices.bucket_size_mb
        planned = PlannedModel.of(config, layout)
        formulas = Formulas(config, planned, choices.compute_dtype, bucket_size_mb or 0.0, choices.tp_chunks)
        return PlannedWorld(formulas, layout)

    @cached_property
    def _kinds_by_place(self) -> Mapping[tuple[int, int], _Kind]:
        """The kind of each place (tp, pp), in the order of ranks within a model."""
        kinds: dict[object, _Kind] = {}
        by_place: dict[tuple[int, int], _Kind] = {}
        for pp in range(self.layout.pp):
            for tp in range(self.layout.tp):
                placements = self.formulas.planned.placements(tp, pp)
                shapes = Counter(placement.local_shape for placement in placements.values())
                traffic = self.formulas.traffic(placements, pp, 0)
                key = frozenset(shapes.items()), frozenset(traffic.items())
                kind = kinds.setdefault(key, _Kind((tp, pp), shapes))
                kind.places += 1
                by_place[tp, pp] = kind
        return by_place

    @property
    def kinds(self) -> Sequence[_Kind]:
        """Each once."""
        return list({kind.first: kind for kind in self._kinds_by_place.values()}.values())

    @property
    def representatives(self) -> list[int]:
        """The first rank of each kind, ascending."""
        return sorted(
            self.layout.rank_of({"tp": tp, "cp": 0, "pp": pp, "dp": 0})
            for tp, pp in (kind.first for kind in self.kinds)
        )

    @property
    def total(self) -> Resident:
        """Over all ranks."""
        found = Resident(Amount(0, 0), Amount(0, 0), Amount(0, 0))
        for kind in self.kinds:
            for part in range(self.layout.size("dp_shard")):
                of_one = self.formulas.resident(kind.shapes, part)
                found += of_one.times(kind.places * self.layout.size("dp_replicate"))
        return found

    def why_no_pass(self, rank: int, most_operators: int) -> str | None:
        """Why a step of ``rank`` is not run; None where it is."""
        operators = self.formulas.operators(self.layout.coordinates(rank)["pp"])
        if operators <= most_operators:
            return None
        return (
            f"a step has about {operators:,} operators on this rank, and {most_operators:,} are tried at most"
        )

    def resident(self, rank: int) -> Resident:
        """Of ``rank``."""
        place = self.layout.coordinates(rank)
        return self.formulas.resident(self._kind_of(place).shapes, place["dp_shard"])

    def traffic(self, rank: int) -> Traffic:
        """Of one step of ``rank``."""
        place = self.layout.coordinates(rank)
        placements = self.formulas.planned.placements(place["tp"], place["pp"])
        return self.formulas.traffic(placements, place["pp"], place["dp_shard"])

    def held(self, rank: int) -> Mapping[str, Placement]:
        """The parameters as ``rank`` holds them between steps."""
        place = self.layout.coordinates(rank)
        placements = self.formulas.planned.placements(place["tp"], place["pp"])
        if self.formulas.stage < 3:
            return placements
        parts = self.layout.size("dp_shard")
        found = {}
        for name, placement in placements.items():
            rows = placement.slices()[0]
            first, count = rows_of_part(rows.stop - rows.start, place["dp_shard"], parts)
            found[name] = placement.cut(Shard("dp_shard", 0, rows.start + first, count))
        return found

    @property
    def largest_state_bytes(self) -> int:
        """Bytes of parameters, reduced gradients and moments on the rank that holds most of them."""
        # Shares are largest at the first place.
        return max(self.formulas.resident(kind.shapes, 0).bytes for kind in self.kinds)

    def alike(self, rank: int) -> int:
        """Ranks of the kind of ``rank``, itself included."""
        return self._kind_of(self.layout.coordinates(rank)).places * self.layout.dp

    def _kind_of(self, place: Mapping[str, int]) -> _Kind:
        return self._kinds_by_place[place["tp"], place["pp"]]
