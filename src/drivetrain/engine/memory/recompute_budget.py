"""Which layers recompute what, so that a rank's live bytes fit a budget and as little as possible is computed twice.

Choices of a layer are points (FLOPs repeated, bytes given back). Only those on their upper hull are worth taking: from
one to the next each FLOP buys fewer bytes. All layers being alike, steps along the hull, the best first, taken by one
layer after the other, are the cheapest way to any number of bytes (a knapsack whose pieces are small). Early layers go
first: what they hold is alive longest. How many steps are needed is not computed but tried, on a whole step over
tensors without memory, because the peak also has what no layer holds.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.config import RunConfig, layout_of
from drivetrain.engine.devices import select_device
from drivetrain.engine.memory.recompute import Plan
from drivetrain.engine.memory.recompute_choice import (
    Choice,
    ChoiceCost,
    choices_for,
    layers_of_rank,
    plan_of_choices,
)
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup
from drivetrain.errors import ConfigurationError

__all__ = [
    "BudgetPlan",
    "agreed",
    "budget_of",
    "choose",
    "hull",
    "name_of",
    "plan_of_run",
    "plan_within_budget",
    "plans_of_stages",
]

_NOTHING: Choice = frozenset()


@dataclass(frozen=True)
class BudgetPlan:
    """What was chosen for one rank.

    Attributes:
        choices: of each layer of the rank.
        peak_bytes: predicted, with them.
        peak_bytes_without: predicted, with nothing recomputed.
        smallest_bytes: the least that any of the plans that were tried comes to.
        costs: of the choices along the hull.
    """

    budget_bytes: int
    choices: Mapping[str, Choice]
    peak_bytes: int
    peak_bytes_without: int
    smallest_bytes: int
    costs: Sequence[ChoiceCost]

    @property
    def plan(self) -> Plan:
        """For :class:`~drivetrain.engine.memory.recompute.Recomputation`."""
        return plan_of_choices(self.choices)

    def to_document(self) -> dict[str, Any]:
        """As events, ``check --json`` and ``train --json`` show it."""
        layers = Counter(self.choices.values())
        kept = self.costs[0].held_bytes
        return {
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "peak_bytes_without": self.peak_bytes_without,
            "smallest_bytes": self.smallest_bytes,
            "choices": [
                {
                    "recomputed": name_of(one.choice),
                    "layers": layers.pop(one.choice, 0),
                    "saved_bytes": kept - one.held_bytes,
                    "repeated_flops": one.repeated_flops,
                }
                for one in self.costs
            ],
            "layers": {name: name_of(choice) for name, choice in self.choices.items()},
        }

    def lines(self) -> list[str]:
        """A table for a reader."""
        document = self.to_document()
        rows = [
            f"  {one['recomputed']:24} {one['layers']:>6} {one['saved_bytes']:>16,} {one['repeated_flops']:>18,}"
            for one in document["choices"]
        ]
        return [
            f"recompute: {self.peak_bytes:,} of {self.budget_bytes:,} bytes predicted at the peak; "
            f"{self.peak_bytes_without:,} with nothing recomputed, {self.smallest_bytes:,} at the least",
            f"  {'recomputed':24} {'layers':>6} {'bytes a layer':>16} {'FLOPs a layer':>18}",
            *rows,
        ]


def name_of(choice: Choice) -> str:
    """``nothing``, ``all`` or the parts."""
    return "all" if choice is None else ",".join(sorted(choice)) or "nothing"


def hull(costs: Sequence[ChoiceCost]) -> list[ChoiceCost]:
    """From recomputing nothing on, the choices with which the next byte costs least, the cheapest first."""
    found = [next(one for one in costs if one.choice == _NOTHING)]
    while True:
        here = found[-1]
        further = [one for one in costs if one.held_bytes < here.held_bytes]
        if not further:
            return found
        found.append(max(further, key=lambda one: (_bytes_per_flop(here, one), -one.held_bytes)))


def _bytes_per_flop(here: ChoiceCost, there: ChoiceCost) -> float:
    return (here.held_bytes - there.held_bytes) / max(1, there.repeated_flops - here.repeated_flops)


def choose(
    layers: Sequence[str],
    costs: Sequence[ChoiceCost],
    budget_bytes: int,
    peak: Callable[[Mapping[str, Choice]], int],
) -> BudgetPlan:
    """The first steps along the hull that make ``peak`` fit.

    Args:
        layers: names, in model order.
        costs: of every choice for a layer, that of nothing among them.
        peak: most bytes alive with choices for all layers; asked a few times.

    Raises:
        ConfigurationError: none fits; with the least budget that one does.
    """
    along = hull(costs)
    # Layer by layer within a step: all layers take the best step before one takes the next best.
    steps = [(name, one.choice) for one in along[1:] for name in layers]
    seen: dict[int, int] = {}

    def after(count: int) -> dict[str, Choice]:
        return {**dict.fromkeys(layers, _NOTHING), **dict(steps[:count])}

    def peak_after(count: int) -> int:
        if count not in seen:
            seen[count] = peak(after(count))
        return seen[count]

    held = {one.choice: one.held_bytes for one in costs}
    given_back = [0]
    for count, (name, choice) in enumerate(steps, start=1):
        given_back.append(given_back[-1] + held[after(count - 1)[name]] - held[choice])
    smallest = len(steps)
    if peak_after(0) > budget_bytes and peak_after(smallest) > budget_bytes:
        # With few layers, what a repeated layer has alive at once can outweigh what it gave back.
        for count in range(len(layers), len(steps), max(1, len(layers))):
            peak_after(count)
        smallest = min(seen, key=lambda count: (seen[count], count))
        if peak_after(smallest) > budget_bytes:
            raise ConfigurationError(
                f"memory.budget_bytes = {budget_bytes:,}: whatever is recomputed, {seen[smallest]:,} bytes are alive "
                f"at once; the nearest that works is memory.budget_bytes = {seen[smallest]}"
            )
    low, high = (1, smallest) if peak_after(0) > budget_bytes else (0, 0)
    nearest = 0
    while low < high:
        # Where the bytes that layers give back say; a step has more, so that this may be off by a few.
        wanted = given_back[nearest] + seen[nearest] - budget_bytes
        tried = next((count for count in range(low, high) if given_back[count] >= wanted), high - 1)
        if peak_after(tried) <= budget_bytes:
            high = tried
        else:
            low = tried + 1
        nearest = tried
    choices = _with_cheaper_end(after(high), steps[:high], costs, budget_bytes, peak, seen)
    return BudgetPlan(
        budget_bytes=budget_bytes,
        choices=choices,
        peak_bytes=peak(choices) if choices != after(high) else peak_after(high),
        peak_bytes_without=peak_after(0),
        smallest_bytes=min(peak_after(len(steps)), *seen.values()),
        costs=along,
    )


def _with_cheaper_end(
    choices: dict[str, Choice],
    steps: Sequence[tuple[str, Choice]],
    costs: Sequence[ChoiceCost],
    budget_bytes: int,
    peak: Callable[[Mapping[str, Choice]], int],
    seen: Mapping[int, int],
) -> dict[str, Choice]:
    """The last step may go further than it must: something cheaper, off the hull, that fits as well."""
    if not steps:
        return choices
    name, choice = steps[-1]
    of = {one.choice: one for one in costs}
    before = next((other for layer, other in reversed(steps[:-1]) if layer == name), _NOTHING)
    missing = seen[len(steps) - 1] - budget_bytes if len(steps) - 1 in seen else 0
    cheaper = sorted(
        (
            one
            for one in costs
            if of[before].repeated_flops < one.repeated_flops < of[choice].repeated_flops
            and of[before].held_bytes - one.held_bytes >= missing
        ),
        key=lambda one: one.repeated_flops,
    )
    for one in cheaper:
        tried = {**choices, name: one.choice}
        if peak(tried) <= budget_bytes:
            return tried
    return choices


def plan_within_budget(config: RunConfig, world_size: int, rank: int, budget_bytes: int) -> BudgetPlan:
    """The plan of ``rank``; not while a process group is there.

    Raises:
        ConfigurationError: no plan fits.
    """
    # Not imported by runs that go by no budget.
    from drivetrain.engine.memory.recompute_measure import cost_of_choices, peak_of_step

    costs = cost_of_choices(config, choices_for(compiled=config.fusion.compile))
    return choose(
        layers_of_rank(config, world_size, rank),
        costs,
        budget_bytes,
        lambda choices: peak_of_step(config, world_size, rank, plan_of_choices(choices)),
    )


def budget_of(config: RunConfig) -> int:
    """Bytes that a rank may have alive: ``memory.budget_bytes``, else the limit, else all that its device has.

    Raises:
        ConfigurationError: none of them is known.
    """
    memory = config.memory
    for given in (memory.budget_bytes, memory.device_memory_limit_bytes):
        if given is not None:
            return given
    device = select_device(config.run)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device.torch_device).total_memory)
    raise ConfigurationError(
        "memory.budget_bytes: absent, and a CPU has no limit of its own; set it, or memory.recompute_granularity to "
        "another value than budget"
    )


def plan_of_run(config: RunConfig, world_size: int, rank: int, budget_bytes: int) -> BudgetPlan:
    """What ``rank`` recomputes; not while a process group is there.

    All ranks of a stage recompute the same, for the one among them that holds most: collectives that are repeated must
    meet.

    Raises:
        ConfigurationError: no plan fits.
    """
    layout = layout_of(config, world_size)
    # The first ranks of a dimension have one more where it does not divide.
    first = layout.rank_of({"tp": 0, "cp": 0, "pp": layout.coordinates(rank)["pp"], "dp": 0})
    return plan_within_budget(config, world_size, first, budget_bytes)


def plans_of_stages(config: RunConfig, world_size: int, budget_bytes: int) -> list[tuple[int, BudgetPlan]]:
    """The plan of every place in the pipeline, with a rank that has it; not while a process group is there.

    Raises:
        ConfigurationError: no plan fits.
    """
    layout = layout_of(config, world_size)
    places = ({"tp": 0, "cp": 0, "pp": pp, "dp": 0} for pp in range(layout.pp))
    ranks = [layout.rank_of(place) for place in places]
    return [(rank, plan_of_run(config, world_size, rank, budget_bytes)) for rank in ranks]


def agreed(plan: BudgetPlan, group: ProcessGroup, mesh: Mesh) -> Mapping[str, Choice]:
    """The choices for all layers of the model, which this rank's ``plan`` and those of other stages are. Collective.

    Raises:
        ConfigurationError: two ranks of a stage would not recompute the same.
    """
    own = json.dumps(
        [mesh.index("pp"), {name: None if one is None else sorted(one) for name, one in plan.choices.items()}]
    )
    found: dict[str, Choice] = {}
    for text in dict.fromkeys(group.gather_texts(own)):
        for name, parts in json.loads(text)[1].items():
            choice = None if parts is None else frozenset(parts)
            if found.setdefault(name, choice) != choice:
                raise ConfigurationError(
                    f"memory.budget_bytes: for layer {name} one rank chose to recompute {name_of(found[name])} and "
                    f"another {name_of(choice)}: their devices differ; give budget_bytes as a number"
                )
    return found
