"""A dry run of a world of any size: a few of its ranks are built, each in a process of its own, the others follow from
the formulas.

Ranks whose parameters have equal shapes and that hand over equal bytes are of one kind. One of each kind is shown
unless others are asked for. Where both exist, what was counted and what the formulas give must be equal.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from drivetrain.config import RunConfig
from drivetrain.engine.dry_run_fake import Counted, Parts
from drivetrain.engine.dry_run_formulas import Resident, Traffic
from drivetrain.engine.dry_run_processes import Failure, RankTask, count_in_processes
from drivetrain.engine.dry_run_world import PlannedWorld
from drivetrain.engine.parallel.traffic import Count
from drivetrain.measure.machine import usable_cores

__all__ = ["DryWorld", "RankFigures", "dry_run_of_ranks"]

_MOST_OPERATORS = 50_000
"""Of a pass over fake tensors: about ten seconds of one core."""
_TIME_LIMIT_S = 180.0


@dataclass(frozen=True)
class RankFigures:
    """One rank of the world.

    Attributes:
        place: its coordinates.
        stands_for: ranks of its kind, itself included. They differ in their place along the data-parallel dimensions,
            by which shares may differ by a row of each parameter.
        resident: parameters and moments were counted on what was built.
        gradients_source, traffic_source: ``counted`` in a pass over fake tensors, or ``formula``.
        why_formula: why there was no such pass; None where there was.
        traffic: of one step; None for collectives that were not counted and have no formula.
        parts: what it holds of each parameter.
    """

    rank: int
    place: Mapping[str, int]
    stands_for: int
    resident: Resident
    gradients_source: str
    traffic: Traffic
    traffic_source: str
    why_formula: str | None
    parts: Parts


@dataclass(frozen=True)
class DryWorld:
    """What the dry run shows.

    Attributes:
        failed: ranks of which nothing can be shown, by rank.
        kinds: number of kinds of ranks.
        total: of all ranks, by the formulas: what several ranks hold alike counts for each of them.
        model_elements: parameters of one model, each element once.
    """

    ranks: tuple[RankFigures, ...]
    failed: Mapping[int, Failure]
    kinds: int
    total: Resident
    model_elements: int


def dry_run_of_ranks(
    config: RunConfig,
    world_size: int,
    ranks: Sequence[int] | None = None,
    *,
    progress: Callable[[int, int], None],
    most_operators: int = _MOST_OPERATORS,
    time_limit_s: float = _TIME_LIMIT_S,
) -> DryWorld:
    """Build ``ranks`` of ``world_size`` processes, and run a step of those where that does not take too long.

    Args:
        config: the rules must hold.
        ranks: which; one of each kind when absent.
        progress: called with the number of ranks that are done and of all that are shown.
        most_operators: of a pass; above that collectives and gradients are those of the formulas.
        time_limit_s: for each rank.
    """
    planned = PlannedWorld.of(config, world_size)
    shown = list(dict.fromkeys(ranks)) if ranks is not None else planned.representatives
    passes = {rank: planned.why_no_pass(rank, most_operators) for rank in shown}
    answers = count_in_processes(
        config,
        world_size,
        [RankTask(rank, with_step=passes[rank] is None) for rank in shown],
        at_once=usable_cores(),
        time_limit_s=time_limit_s,
        progress=lambda done: progress(done, len(shown)),
    )
    return DryWorld(
        ranks=tuple(
            _figures(planned, rank, answer, passes[rank])
            for rank in shown
            if isinstance(answer := answers[rank], Counted)
        ),
        failed={rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)},
        kinds=len(planned.kinds),
        total=planned.total,
        model_elements=sum(map(prod, planned.formulas.planned.wholes.values())),
    )


def _figures(planned: PlannedWorld, rank: int, counted: Counted, why_no_pass: str | None) -> RankFigures:
    """What is shown of a rank that was counted; where there is a formula for it, it must be equal."""
    expected, traffic = planned.resident(rank), planned.traffic(rank)
    found = Resident(counted.parameters, counted.gradients or expected.gradients, counted.moments)
    assert found == expected, f"rank {rank} holds {found}, and the formulas give {expected}"
    parts = {name: ranges for name, _, ranges in counted.parts}
    by_formula = {
        name: tuple((part.start, part.stop) for part in placement.slices())
        for name, placement in planned.held(rank).items()
    }
    assert parts == by_formula, f"rank {rank} holds {parts}, and the formulas give {by_formula}"
    if counted.traffic is not None:
        assert counted.traffic.keys() == traffic.keys(), f"rank {rank}: {counted.traffic} is not {traffic}"
        for key, by_formula_count in traffic.items():
            seen = counted.traffic[key]
            assert by_formula_count is None or (
                seen is not None and _agree(key[0], seen, by_formula_count)
            ), f"rank {rank} hands {seen} to {key}, and the formula gives {by_formula_count}"
    return RankFigures(
        rank=rank,
        place=planned.layout.coordinates(rank),
        stands_for=planned.alike(rank),
        resident=found,
        gradients_source="formula" if counted.gradients is None else "counted",
        traffic=traffic if counted.traffic is None else counted.traffic,
        traffic_source="formula" if counted.traffic is None else "counted",
        why_formula=why_no_pass,
        parts=counted.parts,
    )


def _agree(group: str, counted: Count, by_formula: Count) -> bool:
    """Whether a pass and the formula are equal. Gradients are cut into buckets by the order in which the pass finishes
    them, and in the formula by that of registration: bytes must be equal there, and the number of buckets is the
    pass's."""
    return counted.bytes == by_formula.bytes and (
        counted.calls == by_formula.calls or group in ("dp", "dp_shard", "dp_replicate")
    )
