"""What a model of time may look at."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Observation

__all__ = ["TimeFacts", "Traffic", "facts_of_account"]


@dataclass(frozen=True)
class Traffic:
    """One operator's calls on the activations of a mean step: tensors with a row for each token of a micro-batch.

    Attributes:
        kind: class of the account.
        operator: ``aten::mul``.
        calls: a step.
        ns: a step; a sum of durations.
        bytes: that it must read and write at least, a step, by the shapes of its operands; None where they do not tell.
    """

    kind: str
    operator: str
    calls: float
    ns: float
    bytes: float | None


@dataclass(frozen=True)
class TimeFacts:
    """The input of a model. What is not known is None or empty, and a model that needs it predicts nothing.

    Attributes:
        account: of the configuration's profiled steps.
        config: what was profiled.
        launch: how it was started.
        matmul_flops: dtype → sustained matrix products of one rank's device in FLOP/s, by ``drivetrain bench gemm``
            with as many threads as the run had.
        memory_bandwidth: bytes/s read and written, by ``drivetrain bench memory`` with as many threads.
        observed: of the profiled steps of the lowest rank.
        traffic: of the same steps.
        communication: of the run's summary: means of steps without the profiler on rank 0 (``docs/overlap.md``).
        data_operations: operation of building batches → seconds a micro-batch.
        padding: share of the processed tokens that are padding.
        spare_cores: cores that neither computing nor other processes of the run take.
        threads: compute threads of one process.
    """

    account: Account
    config: RunConfig
    launch: LaunchFacts = field(default_factory=LaunchFacts)
    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    memory_bandwidth: float | None = None
    observed: Observation | None = None
    traffic: tuple[Traffic, ...] = ()
    communication: Mapping[str, Any] | None = None
    data_operations: Mapping[str, float] = field(default_factory=dict)
    padding: float | None = None
    spare_cores: int | None = None
    threads: int | None = None


def facts_of_account(account: Account, config: RunConfig, launch: LaunchFacts | None = None) -> TimeFacts:
    """An account and its configuration, and nothing else."""
    return TimeFacts(account, config, LaunchFacts() if launch is None else launch)
