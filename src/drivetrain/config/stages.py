"""Which layers a pipeline stage holds and on which rank it lies: arithmetic, without a process.

A stage is a run of neighbouring layers. With one stage a rank, stage s lies on rank s. With several (virtual stages)
they are dealt out in turn, stage s on rank s mod P, or along a V: down the ranks and up again, so that the first rank
holds the first stage and the last. (Narayanan et al., arXiv:2104.04473; Qi et al., arXiv:2401.10241; DualPipeV is half
of the DualPipe of DeepSeek-AI, arXiv:2412.19437, which holds every stage twice.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from drivetrain.errors import ConfigurationError

__all__ = [
    "V_SHAPED",
    "ZERO_BUBBLE",
    "Schedule",
    "StagePlan",
    "check_micro_batches",
    "layers_of_text",
    "legal_micro_batches",
    "nearest_micro_batches",
    "plan_stages",
    "stages_per_rank",
]

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]

ZERO_BUBBLE = frozenset({"interleaved_zero_bubble", "zbv", "dualpipev"})
"""Schedules that compute the gradients of weights apart from those of activations (dualpipev at both ends of a step
alone)."""

V_SHAPED = frozenset({"zbv", "dualpipev"})
"""Schedules whose stages lie along a V, two on each rank."""

_INTERLEAVED = frozenset({"interleaved_1f1b", "interleaved_zero_bubble"})


@dataclass(frozen=True)
class StagePlan:
    """Layers of each stage, and the rank of each.

    Attributes:
        layers_per_stage: number of layers of each stage, in model order.
        pp: ranks in the pipeline.
        v_shaped: stages lie along a V instead of in turn.
    """

    layers_per_stage: tuple[int, ...]
    pp: int
    v_shaped: bool = False

    def __post_init__(self) -> None:
        assert self.num_stages % self.pp == 0, f"{self.num_stages} stages on {self.pp} ranks"
        assert not self.v_shaped or self.num_stages == 2 * self.pp, "a V has two stages on each rank"

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.layers_per_stage)

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return sum(self.layers_per_stage)

    def layers(self, stage: int) -> tuple[str, ...]:
        """Names of the layers of ``stage``, in model order: their numbers in the whole model."""
        first = [0, *accumulate(self.layers_per_stage)][stage]
        return tuple(str(layer) for layer in range(first, first + self.layers_per_stage[stage]))

    def rank_of(self, stage: int) -> int:
        """Rank within the pipeline that holds ``stage``."""
        assert 0 <= stage < self.num_stages, f"stage {stage} of {self.num_stages}"
        if self.v_shaped:
            return min(stage, self.num_stages - 1 - stage)
        return stage % self.pp

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages of ``rank``, in model order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def layers_on(self, rank: int) -> tuple[str, ...]:
        """Names of all layers of ``rank``, in model order."""
        return tuple(layer for stage in self.stages_on(rank) for layer in self.layers(stage))

    @property
    def ranks_of_ends(self) -> tuple[int, int]:
        """The ranks of the first stage (embedding) and of the last one (final norm, output, loss)."""
        return self.rank_of(0), self.rank_of(self.num_stages - 1)

    def messages_sent(self, rank: int, num_microbatches: int, *, backward: bool = True) -> int:
        """Hidden states and their gradients that ``rank`` sends to other ranks in one step.

        M forward for each of its stages whose next stage lies elsewhere, M backward for each whose previous one does.
        """
        stages = self.stages_on(rank)
        onward = sum(s + 1 < self.num_stages and self.rank_of(s + 1) != rank for s in stages)
        back = sum(s > 0 and self.rank_of(s - 1) != rank for s in stages)
        return num_microbatches * (onward + back * backward)


def stages_per_rank(schedule: Schedule, virtual: int | None) -> int:
    """Stages on each rank; ``virtual`` is what was asked for, None: 1, or 2 where the schedule needs several."""
    assert schedule in get_args(Schedule), f"no schedule is called {schedule}"
    field = "parallelism.virtual_pipeline_model_parallel_size"
    if schedule in _INTERLEAVED:
        if virtual is not None and virtual < 2:
            raise ConfigurationError(
                f"{field} = {virtual}: {schedule} needs several stages on each rank; the nearest legal value is 2"
            )
        return virtual or 2
    legal = 2 if schedule in V_SHAPED else 1
    if virtual not in (None, legal):
        raise ConfigurationError(
            f"{field} = {virtual}: {schedule} has {legal} on each rank; leave the field out, or set it to {legal}"
        )
    return legal


def layers_of_text(text: str) -> tuple[int, ...]:
    """``"3,2,2,1"`` as layers per stage in model order."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 0:
        raise ConfigurationError(
            f"parallelism.pipeline_model_parallel_layout = {text!r}: expected the number of layers of each stage, "
            'in model order, such as "3,2,2,1"'
        )
    return counts


def plan_stages(
    num_layers: int,
    pp: int,
    schedule: Schedule,
    virtual: int | None = None,
    layers_per_stage: Sequence[int] | None = None,
) -> StagePlan:
    """Deal out ``num_layers``.

    Without ``layers_per_stage`` every stage gets the same number, and where that leaves a rest the earliest stages
    get one more: the last one has the output matrix and the loss besides its layers. With it, only the first and the
    last stage may be without a layer (embedding alone, loss alone).

    Raises:
        ConfigurationError: it does not come out even, or a stage would be empty.
    """
    stages = pp * stages_per_rank(schedule, virtual)
    if layers_per_stage is None:
        if num_layers < stages:
            raise ConfigurationError(
                f"model.num_layers = {num_layers}: {schedule} on {pp} ranks has {stages} stages, and each needs a "
                f"layer; the nearest legal number of layers is {stages}"
            )
        each, rest = divmod(num_layers, stages)
        layers_per_stage = [each + (stage < rest) for stage in range(stages)]
    field = "parallelism.pipeline_model_parallel_layout"
    given = ",".join(map(str, layers_per_stage))
    problems = []
    if len(layers_per_stage) != stages:
        problems.append(
            f"{field} = {given!r}: {len(layers_per_stage)} stages, but {schedule} on {pp} ranks has {stages}"
        )
    if sum(layers_per_stage) != num_layers:
        problems.append(
            f"{field} = {given!r}: {sum(layers_per_stage)} layers, but model.num_layers = {num_layers}"
        )
    if any(count < 1 for count in layers_per_stage[1:-1]):
        problems.append(f"{field} = {given!r}: only the first and the last stage may be without a layer")
    if problems:
        raise ConfigurationError(*problems)
    return StagePlan(tuple(layers_per_stage), pp, v_shaped=schedule in V_SHAPED)


def legal_micro_batches(schedule: Schedule, pp: int, num_microbatches: int) -> bool:
    """Whether ``schedule`` can run that many.

    GPipe runs any number. The others need at least one for each rank, and DualPipeV one for each of its 2 P stages.
    The interleaved ones go in M // P rounds, and the rounds must be equally long.
    """
    if num_microbatches < {"gpipe": 1, "dualpipev": 2 * pp}.get(schedule, pp):
        return False
    return schedule not in _INTERLEAVED or num_microbatches % (num_microbatches // pp) == 0


def nearest_micro_batches(schedule: Schedule, pp: int, num_microbatches: int) -> list[int]:
    """The legal numbers next below, if there is one, and next above."""
    above = num_microbatches + 1
    while not legal_micro_batches(schedule, pp, above):
        above += 1
    below = num_microbatches - 1
    while below > 0 and not legal_micro_batches(schedule, pp, below):
        below -= 1
    return [below, above] if below > 0 else [above]


def check_micro_batches(schedule: Schedule, pp: int, num_microbatches: int) -> None:
    """Raise ConfigurationError with the nearest legal numbers unless ``schedule`` can run ``num_microbatches``."""
    if legal_micro_batches(schedule, pp, num_microbatches):
        return
    nearest = " or ".join(map(str, nearest_micro_batches(schedule, pp, num_microbatches)))
    raise ConfigurationError(
        f"{num_microbatches} micro-batches in a step: {schedule} on {pp} ranks cannot run that many; "
        f"the nearest legal number is {nearest}"
    )
