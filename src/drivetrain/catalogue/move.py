"""Several leaves that belong together, as one declared change of an entry."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import NoPrediction, Prediction

__all__ = ["LearningRateRule", "Move", "Numerics", "Setting", "StepEstimate"]

Numerics = Literal["exact", "round-off", "statistical"]
"""What an optimisation may do to the numbers, and so which gate it must pass: nothing, to the bit; another order or
rounding of the same arithmetic; another arithmetic, whose training must be as good."""

LearningRateRule = Literal["none", "sqrt", "linear"]
"""How the learning rate follows a batch of k times the size: not at all, by √k (Adam; Malladi et al. 2022,
arXiv 2205.10287), or by k (SGD; Goyal et al. 2017, arXiv 1706.02677)."""


@dataclass(frozen=True)
class StepEstimate:
    """What a step of a configuration is expected to need, from the engine's own code over tensors without memory.

    Attributes:
        peak_bytes: most live tensor bytes of a rank, as ``memory.device_memory_limit_bytes`` counts them.
        repeated_flops: that a rank's backward passes compute again, of one step: products, and one for each element
            that other operators write.
        recomputed: what that is, in words.
    """

    peak_bytes: int
    repeated_flops: int
    recomputed: str


@dataclass(frozen=True)
class Setting:
    """Between what a move is made.

    Attributes:
        facts: of the launch.
        batch_rule: how the learning rate follows a larger global batch; None: the global batch stays as it is.
    """

    facts: LaunchFacts
    batch_rule: LearningRateRule | None = None


@dataclass(frozen=True)
class Move:
    """A change of several leaves, each of which alone would be another experiment.

    The tuner offers it, the gate accepts it between two runs as one declared change.

    Attributes:
        name: identifier, unique within its entry.
        summary: what it does, in one line.
        numerics: the gate that it must pass, whatever its entry's own is.
        treats: account classes whose time it can reduce.
        leaves: all that it may change.
        refused: None, or why it cannot be made from a configuration.
        proposes: leaf → value of each size it has there, the smallest first; asked where ``refused`` is None. Which of
            them fit ``memory.device_memory_limit_bytes`` is for the tuner to find out.
        describes: what the difference of two configurations is as such a move, in words; None: it is none. The leaves
            that differ are among ``leaves``, and more than nothing.
        predict: (account of the first, first, second, launch, what a step of the first needs, and of the second) →
            expected gain in tokens/s.
    """

    name: str
    summary: str
    numerics: Numerics
    treats: tuple[str, ...]
    leaves: frozenset[str]
    refused: Callable[[RunConfig, Setting], str | None]
    proposes: Callable[[RunConfig, Setting], Sequence[Mapping[str, Any]]]
    describes: Callable[[RunConfig, RunConfig], str | None]
    predict: Callable[
        [Account, RunConfig, RunConfig, LaunchFacts, StepEstimate, StepEstimate], Prediction | NoPrediction
    ]
