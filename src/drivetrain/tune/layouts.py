"""Layouts of the processes that a ladder may try: the legal ones, ranked by a rule that explains itself.

A layout is no optimisation of the catalogue: it says which ranks share what. Proposed are data parallelism with each
``zero_stage``, tensor parallelism of two ranks, pipelines of two, and both; where cost is the goal, also on half as
many processes, and half of that. What is expected of one is arithmetic on the account of the present layout
(:func:`expected_step`), and only what it expects to gain is proposed, the most first.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.catalogue import Numerics
from drivetrain.config import RunConfig, leaf_values, least_processes, tokens_per_step
from drivetrain.config.layout import model_ranks
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import NoPrediction, Prediction
from drivetrain.measure.parameters import parameter_count

__all__ = [
    "LAYOUT_LEAVES",
    "LayoutProposal",
    "Shape",
    "expected_step",
    "processes_of",
    "propose_layouts",
    "shape_of",
    "state_bytes",
]

_TP = "parallelism.tensor_model_parallel_size"
_SP = "parallelism.sequence_parallel"
_PP = "parallelism.pipeline_model_parallel_size"
_DP = "parallelism.data_parallel_size"
_ZERO = "parallelism.zero_stage"
LAYOUT_LEAVES = frozenset({_TP, _SP, _PP, _DP, _ZERO})
"""All that a layout changes."""
_LARGEST = 2
"""Ranks that share a layer, or that layers are laid over, in what is proposed."""
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_GRADIENT_BYTES = 4
_STATE_BYTES = {"parameters": 4, "gradients": 4, "optimizer": 8}
"""Of an element: fp32 masters, fp32 gradients, two fp32 moments."""
_ALL_REDUCES_OF_LAYER = 4
"""Sums over tensor-parallel ranks in a layer: after attention and after the MLP, forward, and of their inputs'
gradients, backward (Shoeybi et al. 2019, arXiv 1909.08053)."""


def processes_of(config: RunConfig, given: int) -> int:
    """Processes of a run of ``config``: what its sizes come to where they say it, else ``given``."""
    return given if config.parallelism.data_parallel_size is None else least_processes(config)


@dataclass(frozen=True)
class Shape:
    """Sizes of a layout: ranks that share a layer, that layers are laid over, that take different samples; and what
    the last share."""

    tp: int
    pp: int
    dp: int
    zero: int

    @property
    def processes(self) -> int:
        """All of them."""
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        """``tp2-dp4-zero1``: what is 1 or 0 is left out."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        return "-".join([*parts, *([f"zero{self.zero}"] if self.zero else [])]) or "one"

    @property
    def in_words(self) -> str:
        """For a reader."""
        parts = []
        if self.tp > 1:
            parts.append(f"{self.tp} ranks share each layer (tensor parallelism)")
        if self.pp > 1:
            parts.append(f"layers lie on {self.pp} ranks (pipeline)")
        if self.dp > 1:
            shared = ("", ", optimizer state shared", ", gradients shared, too", ", parameters shared, too")
            parts.append(f"{self.dp} data-parallel ranks{shared[self.zero]}")
        return "; ".join(parts) or "one process"


@dataclass(frozen=True)
class LayoutProposal:
    """A layout that a ladder may try.

    Attributes:
        name: identifier.
        shape: its sizes.
        leaves: leaf → value, of all that change.
        summary: what it is, in one line.
        ratio: expected score over the present one's; None: nothing tells.
        rule: how that was reckoned, with its numbers.
        is_of_speed: whether the ratio is of tokens/s, and not of bytes or cost.
        place: its rank among the proposals, from 0.
        treats: account classes whose time it can reduce.
        relieves: categories of memory that it makes smaller.
        numerics: the gate that it must pass: other layouts add the same numbers in another order.
    """

    name: str
    shape: Shape
    leaves: Mapping[str, Any]
    summary: str
    ratio: float | None
    rule: str
    is_of_speed: bool = True
    place: int = 0
    treats: tuple[str, ...] = ("communication", "bubble", "compute.optimizer")
    relieves: tuple[str, ...] = ("parameters", "optimizer", "gradients", "activations")
    numerics: Numerics = "round-off"

    @property
    def expected(self) -> Prediction | NoPrediction:
        """The ratio as a trial's step has it; only of speed, which trials measure whatever the goal."""
        if self.ratio is None or not self.is_of_speed:
            return NoPrediction(self.rule)
        return Prediction(self.ratio, self.rule)


def shape_of(config: RunConfig, processes: int) -> Shape:
    """The layout of ``config`` on so many processes. The rules must hold."""
    parallelism = config.parallelism
    return Shape(
        parallelism.tensor_model_parallel_size,
        parallelism.pipeline_model_parallel_size,
        processes // model_ranks(config),
        parallelism.zero_stage,
    )


def propose_layouts(
    config: RunConfig,
    processes: int,
    account: Account | None,
    *,
    legal: Callable[[Mapping[str, Any]], str | None],
    fewer: bool = False,
    for_memory: bool = False,
) -> tuple[list[LayoutProposal], dict[str, str]]:
    """Layouts, the most promising first, and why others are not proposed.

    Args:
        processes: of the present layout.
        account: of the present layout; None: order by what travels.
        legal: leaves → None, or why they may not be run.
        fewer: also on fewer processes, which have to cost less than they are slower.
        for_memory: the one that leaves a rank the least state first, whatever its speed.
    """
    present = shape_of(config, processes)
    rejected: dict[str, str] = {}
    found: list[LayoutProposal] = []
    for shape in _shapes(processes, fewer):
        if shape == present:
            continue
        key = f"layout:{shape.name}"
        leaves = _leaves(config, shape, processes)
        why = _other_masks(config, present, shape) or legal(leaves)
        if why is not None:
            rejected[key] = why
            continue
        proposal = _proposal(config, present, shape, leaves, account, for_memory)
        if proposal.ratio is not None and proposal.ratio <= 1:
            rejected[key] = f"expected {proposal.ratio:.3f}x: {proposal.rule}"
            continue
        if shape.processes < processes:
            # Less of everything is paid for, not only less communication.
            proposal = replace(
                proposal, treats=(*proposal.treats, "compute", "recompute", "data", "host", "idle")
            )
        found.append(proposal)
    found.sort(
        key=lambda one: (
            -(one.ratio or 0.0),
            _bytes_on_the_wire(config, one.shape),
            one.shape.zero,
            one.name,
        )
    )
    return [replace(one, place=place) for place, one in enumerate(found)], rejected


def _shapes(processes: int, fewer: bool) -> Iterator[Shape]:
    number = processes
    while number >= 1:
        for tp in (1, _LARGEST):
            for pp in (1, _LARGEST):
                if number % (tp * pp) == 0:
                    dp = number // (tp * pp)
                    yield from (Shape(tp, pp, dp, zero) for zero in (range(4) if dp > 1 else (0,)))
        if not fewer or number % 2:
            return
        number //= 2


def _leaves(config: RunConfig, shape: Shape, processes: int) -> dict[str, Any]:
    """What changes. The data-parallel size is said where it was, and where it tells of fewer processes."""
    wanted: dict[str, Any] = {
        _TP: shape.tp,
        _PP: shape.pp,
        _ZERO: shape.zero,
        _SP: config.parallelism.sequence_parallel and shape.tp > 1,
    }
    if config.parallelism.data_parallel_size is not None or shape.processes != processes:
        wanted[_DP] = shape.dp
    values = {leaf.path: value for leaf, value in leaf_values(config)}
    return {leaf: value for leaf, value in wanted.items() if values[leaf] != value}


def _other_masks(config: RunConfig, present: Shape, shape: Shape) -> str | None:
    model = config.model
    if (present.tp, present.pp, present.dp) == (shape.tp, shape.pp, shape.dp):
        return None
    if model.hidden_dropout or model.attention_dropout:
        return "the ranks of another layout draw other dropout masks, which is more than round-off"
    return None


def _proposal(
    config: RunConfig,
    present: Shape,
    shape: Shape,
    leaves: Mapping[str, Any],
    account: Account | None,
    for_memory: bool,
) -> LayoutProposal:
    if for_memory:
        before, after = state_bytes(config, present), state_bytes(config, shape)
        rule = f"parameters, gradients and moments of a rank: {before:,} to {after:,} bytes; activations as they are"
        return LayoutProposal(shape.name, shape, leaves, shape.in_words, before / after, rule, False)
    expected = None if account is None else expected_step(account, config, present, shape)
    if expected is None:
        sent = _bytes_on_the_wire(config, shape)
        rule = (
            f"a rank hands {sent / 1e6:.3g} MB a step to others, now {_bytes_on_the_wire(config, present) / 1e6:.3g} "
            "MB; the account tells no speed of what travels, so the least comes first"
        )
        return LayoutProposal(shape.name, shape, leaves, shape.in_words, None, rule)
    ratio, rule = expected
    same = shape.processes == present.processes
    if not same:
        ratio *= present.processes / shape.processes
        rule += f"; cost: times {present.processes} / {shape.processes} processes"
    return LayoutProposal(shape.name, shape, leaves, shape.in_words, ratio, rule, same)


def expected_step(
    account: Account, config: RunConfig, present: Shape, shape: Shape
) -> tuple[float, str] | None:
    """Step time now over that of ``shape``, and how it was reckoned; None where the account tells no speed of what
    travels although more than now would.

    Work is shared out evenly, the optimizer's update by the elements that a rank updates. What travels is as exposed a
    byte as now, by kind where the account knows it, else as the most exposed kind that there is. A pipeline of p ranks
    and m micro-batches stands for (p - 1) / m of its work.
    """
    windows = [step.window for rank in account.ranks for step in rank.steady_steps]
    if not windows:
        return None

    def mean(*names: str) -> float:
        return sum(window.group_ns(name) for window in windows for name in names) / len(windows)

    wall = sum(window.window_ns for window in windows) / len(windows)
    update = mean("compute.optimizer")
    bubble, wire = mean("bubble"), mean("communication")
    work = wall - update - bubble - wire
    sent_now, sent_then = _sent(config, present), _sent(config, shape)
    speed = _ns_per_byte(mean, sent_now)
    if any(sent_then.values()) and not speed:
        return None
    slowest = max(speed.values(), default=0.0)
    wire_then = sum(size * speed.get(kind, slowest) for kind, size in sent_then.items())
    shared = present.processes / shape.processes
    work_then = work * shared
    update_then = update * _updated(config, shape) / _updated(config, present)
    passes = config.training.global_batch_size / (config.training.micro_batch_size * shape.dp)
    bubble_then = work_then * (shape.pp - 1) / max(1.0, passes)
    then = work_then + update_then + wire_then + bubble_then
    rule = (
        f"work {work / 1e6:.3g} to {work_then / 1e6:.3g} ms a step, update {update / 1e6:.3g} to "
        f"{update_then / 1e6:.3g}, what travels {wire / 1e6:.3g} to {wire_then / 1e6:.3g} "
        f"({_mb(sent_now)} to {_mb(sent_then)} MB a rank, as exposed a byte as now), bubble {bubble / 1e6:.3g} to "
        f"{bubble_then / 1e6:.3g}"
    )
    return wall / then, rule


def _mb(sent: Mapping[str, float]) -> str:
    return f"{sum(sent.values()) / 1e6:.3g}"


def _ns_per_byte(mean: Callable[..., float], sent: Mapping[str, float]) -> dict[str, float]:
    """Exposed ns of a byte that travels now, by kind; where groups are not told apart, of all kinds alike."""
    total = sum(sent.values())
    known = {kind: mean(f"communication.{kind}") for kind in sent}
    other = mean("communication") - sum(known.values())
    if not total:
        return {}
    if other > sum(known.values()):
        return {kind: mean("communication") / total for kind, size in sent.items() if size}
    return {kind: ns / sent[kind] for kind, ns in known.items() if sent[kind] and ns > 0}


def _sent(config: RunConfig, shape: Shape) -> dict[str, float]:
    """Bytes that a rank hands to others in a step, by group: rings of n ranks send (n - 1) / n of what they gather or
    scatter, and twice that of what they sum."""
    tokens = tokens_per_step(config) / shape.dp
    width = config.model.hidden_size * _ELEMENT_BYTES[config.precision.params_dtype]
    held = _elements(config, shape)
    passes = config.training.global_batch_size / (config.training.micro_batch_size * shape.dp)
    ring = (shape.dp - 1) / shape.dp
    # Stage 3 gathers for each pass forward and backward what the others gather once.
    gathers = 2 * passes if shape.zero == 3 else 1.0
    layers = config.model.num_layers / shape.pp
    return {
        "dp": ring * held * _GRADIENT_BYTES * (1 + gathers),
        "tp": 2 * (shape.tp - 1) / shape.tp * _ALL_REDUCES_OF_LAYER * layers * tokens * width,
        "pp": 2 * tokens * width * (shape.pp - 1) / shape.pp,
    }


def _bytes_on_the_wire(config: RunConfig, shape: Shape) -> float:
    return sum(_sent(config, shape).values())


def _elements(config: RunConfig, shape: Shape) -> float:
    """Of the parameters that one rank of a model has."""
    return parameter_count(config.model).total / (shape.tp * shape.pp)


def _updated(config: RunConfig, shape: Shape) -> float:
    """Elements that a rank updates."""
    return _elements(config, shape) / (shape.dp if shape.zero else 1)


def state_bytes(config: RunConfig, shape: Shape) -> int:
    """Of parameters, gradients and moments that a rank holds between steps, by the sizes alone."""
    held = _elements(config, shape)
    shares = {
        "optimizer": shape.dp if shape.zero >= 1 else 1,
        "gradients": shape.dp if shape.zero >= 2 else 1,
        "parameters": shape.dp if shape.zero >= 3 else 1,
    }
    return round(sum(held * size / shares[kind] for kind, size in _STATE_BYTES.items()))
